"""Vocabularies trained on the spot, and strings to try them on."""

import random
from typing import Any

import pytest
import tokenizers

from napkin.data.corpus import standard_library
from napkin.tokenizer.bpe import BPETokenizer
from napkin.tokenizer.bpe_training import train_bpe

END = "<|endoftext|>"
SPECIAL = [END, "<|end|>", "<|end|>!"]
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUSTOM = r"[A-Za-z]+|\d{1,2}|\s+|[^\sA-Za-z\d]+"
SPELLINGS = {"gpt2": None, "gpt4": CL100K, CUSTOM: CUSTOM}
"""napkin's patterns, and the Split that means the same; ByteLevel itself has GPT-2's."""

SCRIPTS = (
    "Größe naïve Ελληνικά русский язык עברית العربية हिन्दी 한국어 日本語 你好世界 🌍👩\u200d👩\u200d👧 ½ Ⅳ ４２ İſ"
    "\u00a0\u2028\u3000"
)


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    """Code and a little of many scripts."""
    documents = [document.text for document in standard_library() if document.name.startswith(("json/", "email/m"))]
    return [*documents, *[f"{SCRIPTS} it's I'LL\r\n\r\n  'twas 12345 --- {n}\n" for n in range(50)]]


@pytest.fixture(scope="session")
def strings(corpus: list[str]) -> list[str]:
    """Stretches of the corpus, and what no corpus holds."""
    draw = random.Random(0)
    text = "".join(corpus)
    found = [*corpus[:2], *corpus[-2:], "", " ", *SPECIAL, SCRIPTS]
    for _ in range(800):
        start = draw.randrange(len(text))
        found.append(text[start : start + draw.randint(1, 60)])
    for alphabet in (SCRIPTS, "'sStTlL vedrm", " \n\r\t", "ab\u00e9 1'.\n", "aA1 <|endof>!" + END):
        found += ["".join(draw.choices(alphabet, k=draw.randint(1, 30))) for _ in range(250)]
    found += ["".join(draw.choices([*SPECIAL, "a", " "], k=draw.randint(1, 6))) for _ in range(200)]
    return found


@pytest.fixture(scope="session", params=SPELLINGS)
def napkins(request: pytest.FixtureRequest, corpus: list[str]) -> BPETokenizer:
    """Trained by napkin."""
    return train_bpe(corpus, 600, SPECIAL, request.param)


@pytest.fixture(scope="session", params=SPELLINGS)
def theirs(request: pytest.FixtureRequest, corpus: list[str]) -> tokenizers.Tokenizer:
    """Trained by Hugging Face's library, which puts special tokens first and bytes in GPT-2's order."""
    split = SPELLINGS[request.param]
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    made: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = byte_level
    if split is not None:
        cut = tokenizers.pre_tokenizers.Split(tokenizers.Regex(split), "isolated")
        made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([cut, byte_level])
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(corpus, trainer)
    return made
