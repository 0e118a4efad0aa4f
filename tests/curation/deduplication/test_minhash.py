"""Signatures estimate the Jaccard similarity, without bias and with the documented error."""

import random
import re
from hashlib import blake2b

import numpy as np
import pytest
from numpy.typing import NDArray

from napkin.curation.deduplication import MinHash, estimated_similarity, near_duplicates, plain_signature
from napkin.errors import NapkinError


def shingles(text: str, n: int) -> set[tuple[str, ...]]:
    """The definition, for text of Latin letters."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return {tuple(words[i : i + n]) for i in range(max(len(words) - n + 1, 1))} if words else set()


def similarity(first: str, second: str, n: int) -> float:
    a, b = shingles(first, n), shingles(second, n)
    return len(a & b) / len(a | b)


def planted_pairs(shared: int, own: int, pairs: int) -> tuple[list[str], list[str]]:
    """Texts of different words, of which two texts of a pair share some."""
    draw = random.Random(shared)
    first, second = [], []
    for _ in range(pairs):
        words = [f"w{draw.getrandbits(60):x}" for _ in range(shared + 2 * own)]
        first.append(" ".join(words[: shared + own]))
        second.append(" ".join(words[:shared] + words[shared + own :]))
    return first, second


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("shared", "own"), [(20, 5), (50, 50), (400, 50), (3000, 1000), (3000, 50)])
def test_the_estimate_is_unbiased_and_its_error_is_that_of_the_formula(shared: int, own: int) -> None:
    minhash = MinHash(hashes=128, words=1)
    first, second = planted_pairs(shared, own, 300)
    estimates = estimated_similarity(minhash.signatures(first)[0], minhash.signatures(second)[0])
    truth = shared / (shared + 2 * own)
    error = np.sqrt(truth * (1 - truth) / 128)
    assert abs(estimates.mean() - truth) < 4 * error / np.sqrt(300)
    # The sample's own error of a standard deviation is 1 / sqrt(600). With few shingles two numbers of a signature
    # seldom have the same one, and the error is smaller.
    assert estimates.std() < error * (1 + 4 / np.sqrt(600))
    if shared == 3000:
        assert estimates.std() > error * 0.85


def test_the_similarity_of_real_sentences_is_that_of_their_shingles() -> None:
    draw = random.Random(1)
    words = "the cat sat on a mat while dogs ran over hills and far away from all houses".split()
    texts = [" ".join(draw.choices(words, k=300)) for _ in range(20)]
    edited = []
    for text in texts:
        parts = text.split()
        for place in draw.sample(range(300), 8):
            parts[place] = "other"
        edited.append(" ".join(parts))
    minhash = MinHash(hashes=1024)
    estimates = estimated_similarity(minhash.signatures(texts)[0], minhash.signatures(edited)[0])
    truths = np.array([similarity(a, b, 5) for a, b in zip(texts, edited, strict=True)])
    assert np.abs(estimates - truths).max() < 4 * np.sqrt(0.25 / 1024)


def test_the_compiled_form_estimates_what_the_formula_does() -> None:
    """A pair of documents for each share of common words, none and all among them; both forms take 512 numbers."""

    def plain(text: str) -> NDArray[np.int64]:
        hashes = {
            int.from_bytes(blake2b(" ".join(each).encode(), digest_size=7).digest()) for each in shingles(text, 5)
        }
        return np.array(plain_signature(hashes, 512))

    draw = random.Random(3)
    words = [f"w{i}" for i in range(400)]
    first = [" ".join(draw.choices(words, k=120)) for _ in range(41)]
    second = [" ".join([*text.split()[: 3 * i], *draw.choices(words, k=120 - 3 * i)]) for i, text in enumerate(first)]
    minhash = MinHash(hashes=512, words=5)
    compiled = estimated_similarity(minhash.signatures(first)[0], minhash.signatures(second)[0])
    formula = estimated_similarity(np.stack([*map(plain, first)]), np.stack([*map(plain, second)]))
    truth = np.array([similarity(a, b, 5) for a, b in zip(first, second, strict=True)])
    error = np.sqrt(truth * (1 - truth) / 512)
    assert (compiled[0], compiled[-1]) == (formula[0], formula[-1]) == (0, 1)
    assert (np.abs(formula - truth) <= 4 * error).all()
    assert (np.abs(compiled - formula) <= 4 * np.sqrt(2) * error).all()
    assert abs((compiled - formula).mean()) < 4 * np.sqrt(2 * (error**2).sum()) / 41


def test_case_punctuation_and_white_space_do_not_count() -> None:
    plain = "one two three four five six seven éclair straße"
    other = "  One, TWO\n\nthree -- four 'five' (six)\tSeven: ÉCLAIR; straße!"
    signatures, words = MinHash().signatures([plain, other, "one two three four five six seven éclair"])
    assert words.tolist() == [9, 9, 8]
    assert (signatures[0] == signatures[1]).all()
    assert not (signatures[0] == signatures[2]).all()


def test_characters_of_scripts_without_spaces_are_words() -> None:
    _, words = MinHash().signatures(["今日は", "ไทย", "한국어 말", "हिन्दी", "", " -- ", "don't"])
    assert words.tolist() == [3, 3, 2, 1, 0, 0, 2]


def test_a_text_of_fewer_words_than_a_shingle_is_one_shingle() -> None:
    signatures, _ = MinHash(words=5).signatures(["a b c", "A, b; c", "a b d", "c b a"])
    assert (signatures[0] == signatures[1]).all()
    # Each of 128 numbers is equal by chance once in 2^32.
    assert not (signatures[0] == signatures[2]).any()
    assert not (signatures[0] == signatures[3]).any()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_texts_of_up_to_a_shingle_are_equal_where_all_their_words_are(n: int) -> None:
    """Of so short a text all numbers come from its only shingle: they are all equal, or none."""
    words = "river harbour winter engine letter".split()[:n]
    texts = [" ".join(each) for each in (words, [*words[:-1], "garden"], ["garden", *words[1:]], map(str.upper, words))]
    signatures, counts = MinHash(words=5).signatures(texts)
    assert counts.tolist() == [n] * 4
    assert (signatures[0] == signatures[3]).all()
    for other in signatures[1:3]:
        assert not (signatures[0] == other).any()
    assert near_duplicates([*texts, " ".join([*words, "museum"])]) == ([[0, 3], [1, 2]] if n == 1 else [[0, 3]])


def test_a_signature_does_not_depend_on_the_texts_beside_it() -> None:
    draw = random.Random(2)
    texts = [" ".join(f"w{draw.randrange(n + 1)}" for _ in range(n)) for n in [0, 1, 4, 5, 60, 700, 9000] * 3]
    minhash = MinHash(hashes=64)
    together, _ = minhash.signatures(texts)
    assert (together == np.concatenate([minhash.signatures([text])[0] for text in texts])).all()


def test_repeated_shingles_count_once() -> None:
    signatures, _ = MinHash(words=1).signatures(["a b", "a b " * 50_000])
    assert (signatures[0] == signatures[1]).all()


def test_any_text_has_a_signature() -> None:
    texts = ["\ud800 lone surrogate", "\0\0", "a" * 100_000, "𝒳 " * 10, "\U0010ffff"]
    signatures, words = MinHash().signatures(texts)
    assert signatures.shape == (5, 128)
    assert words.tolist() == [2, 0, 1, 10, 0]


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(NapkinError, match="0 hashes"):
        MinHash(hashes=0)
    with pytest.raises(NapkinError, match="65 words"):
        MinHash(words=65)
