"""Blocks of a token file, verified when they are first read: each once, all that are read, none that are not."""

import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napkin.data import SEPARATOR, Batches, Document, TokenFile, TokenGuard, evaluation_windows, write_token_file
from napkin.data.batches import Prefetcher
from napkin.data.token_file import BLOCK_BYTES, BlockChecksums, Sidecar, read_sidecar, sidecar_path
from napkin.data.token_writer import write_token_files
from napkin.errors import CorruptFile
from napkin.tokenizer import ByteTokenizer
from oracles.altered_tokens import flip_bit, hashed_blocks

BYTES = ByteTokenizer([SEPARATOR])
BLOCK_TOKENS = BLOCK_BYTES // 2
N_BLOCKS = 6


def text(n_bytes: int) -> str:
    return random.Random(n_bytes).randbytes(n_bytes // 2).hex()


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five whole blocks and half of one."""
    path = tmp_path_factory.mktemp("tokens") / "x.tokens"
    write_token_file(path, [Document("x", text(BLOCK_TOKENS * 11 // 2 - 2))], BYTES)
    return path


@pytest.fixture
def path(intact: Path, tmp_path: Path) -> Path:
    """A copy that may be altered."""
    for name in ("x.tokens", "x.tokens.json"):
        (tmp_path / name).write_bytes((intact.parent / name).read_bytes())
    return tmp_path / "x.tokens"


def opened(path: Path) -> TokenFile:
    token_file = TokenFile.open(path)
    assert token_file.verify_on_read()
    return token_file


def as_version_1(path: Path) -> None:
    """Give a token file the sidecar that an earlier version wrote."""
    content = msgspec.json.decode(sidecar_path(path).read_bytes())
    del content["block_bytes"], content["blocks"]
    sidecar_path(path).write_bytes(msgspec.json.encode(content | {"version": 1}))


def test_the_sidecar_has_the_checksum_of_each_block(intact: Path) -> None:
    data = intact.read_bytes()
    blocks = [data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)]
    assert len(blocks) == N_BLOCKS
    assert read_sidecar(intact).blocks == "".join(sha256(block).hexdigest()[:16] for block in blocks)
    TokenFile.open(intact, verify=True)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3 * BLOCK_BYTES), max_size=6))
def test_checksums_of_blocks_do_not_depend_on_how_the_bytes_come(pieces: list[int]) -> None:
    data = bytes(range(251)) * (sum(pieces) // 251 + 1)
    data, checksums, start = data[: sum(pieces)], BlockChecksums(), 0
    for size in pieces:
        checksums.update(data[start : start + size])
        start += size
    blocks = [data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)]
    assert checksums.hexdigest() == "".join(sha256(block).hexdigest()[:16] for block in blocks)


def test_a_file_written_with_a_stop_has_the_same_checksums(tmp_path: Path) -> None:
    documents = [Document(str(n), text(700_000 + n)) for n in range(4)]

    def until(count: int) -> Iterator[Document]:
        yield from documents[:count]
        raise KeyboardInterrupt

    for stop in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            write_token_files({tmp_path / "a": lambda stop=stop: until(stop)}, BYTES, print, bytes_per_record=1)
    write_token_files({tmp_path / "a": lambda: documents}, BYTES, print)
    write_token_file(tmp_path / "b", documents, BYTES)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert len(read_sidecar(tmp_path / "a").block_digests) == 8 * 11


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=40), st.integers(1, 3 * BLOCK_TOKENS), st.data())
def test_a_flipped_bit_is_told_by_the_windows_that_read_its_block_alone(
    intact: Path, starts: list[int], length: int, data: st.DataObject
) -> None:
    token_file = opened(intact)
    n = token_file.n_tokens
    length = min(length, n)
    at = np.array(starts, np.int64) % (n - 1)
    expected = [
        np.concatenate([token_file.tokens[start:], token_file.tokens[1:]])[:length].tolist() for start in at.tolist()
    ]
    with hashed_blocks() as hashed:
        assert token_file.windows(at, length).tolist() == expected
        token_file.windows(at, length)
    edges = np.unique([*range(0, length, BLOCK_TOKENS), length - 1])
    read = {
        (place if place < n else place - n + 1) // BLOCK_TOKENS
        for start in at.tolist()
        for place in {*(start + edges).tolist(), min(start + length, n) - 1, *([n] if start + length > n else [])}
    }
    sizes = [len(token_file.tokens[block * BLOCK_TOKENS :][:BLOCK_TOKENS]) * 2 for block in range(N_BLOCKS)]
    assert sum(hashed) == sum(sizes[block] for block in read), "not the blocks that were read, once"

    bad = data.draw(st.integers(0, N_BLOCKS - 1))
    altered = TokenFile(intact, token_file.tokens.copy(), read_sidecar(intact))
    altered.verify_on_read()
    altered.tokens[bad * BLOCK_TOKENS + data.draw(st.integers(0, sizes[bad] // 2 - 1))] ^= 1
    if bad not in read:
        assert altered.windows(at, length).tolist() == expected
        return
    with pytest.raises(CorruptFile) as caught:
        altered.windows(at, length)
    assert f"x.tokens' was altered: block {bad} (from byte {bad * BLOCK_BYTES:,})" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_verification_nothing_is_read_twice_or_told(path: Path) -> None:
    flip_bit(path, 5)
    token_file = TokenFile.open(path)
    with hashed_blocks() as hashed:
        token_file.windows(np.array([0]), 10)
    assert not hashed


def test_the_whole_file_s_verification_names_the_block(path: Path) -> None:
    flip_bit(path, 3 * BLOCK_BYTES + 77)
    with pytest.raises(CorruptFile, match=r"altered.*SHA-256.*, block 3 \(from.*1,572,864\)"):
        TokenFile.open(path, verify=True)


def test_checksums_that_were_altered_themselves_are_told(path: Path) -> None:
    content = msgspec.json.decode(sidecar_path(path).read_bytes())
    sidecar_path(path).write_bytes(msgspec.json.encode(content | {"blocks": "0" * 16 + content["blocks"][16:]}))
    with pytest.raises(CorruptFile, match=r"sidecar.*'.*'.*altered: block 0"):
        TokenFile.open(path, verify=True)
    with pytest.raises(CorruptFile, match=r"was altered: block 0"):
        opened(path).windows(np.array([0]), 10)


def test_a_token_outside_the_vocabulary_is_told_with_its_place(path: Path) -> None:
    ids = np.fromfile(path, "<u2")
    ids[BLOCK_TOKENS + 9] = 257
    ids.tofile(path)
    checksums = BlockChecksums()
    checksums.update(path.read_bytes())
    content = msgspec.json.decode(sidecar_path(path).read_bytes())
    content |= {"sha256": sha256(path.read_bytes()).hexdigest(), "blocks": checksums.hexdigest()}
    sidecar_path(path).write_bytes(msgspec.json.encode(content))
    token_file = opened(path)
    token_file.windows(np.array([0]), 10)
    with pytest.raises(CorruptFile, match=r"token 257.*byte 524,306.*block 1.*vocabulary.*256"):
        token_file.windows(np.array([BLOCK_TOKENS + 100]), 10)


def test_an_evaluation_verifies_what_it_reads(path: Path) -> None:
    flip_bit(path, 2 * BLOCK_BYTES + 1)
    token_file = opened(path)
    batches = evaluation_windows(token_file, context_length=1024, stride=1024, batch_size=16)
    with hashed_blocks() as hashed:
        for _ in range(2 * BLOCK_TOKENS // (16 * 1024) - 1):
            next(batches)
        with pytest.raises(CorruptFile, match="was altered: block 2"):
            next(batches)
    assert sum(hashed) == 3 * BLOCK_BYTES


def test_a_file_of_an_earlier_version_is_read_and_verified_whole(path: Path) -> None:
    as_version_1(path)
    token_file = TokenFile.open(path, verify=True)
    assert not token_file.verify_on_read()
    with hashed_blocks() as hashed:
        assert token_file.windows(np.array([3]), 5).tolist() == [token_file.tokens[3:8].tolist()]
    assert not hashed
    token_file.verify_again()
    flip_bit(path, 9)
    for verify in (token_file.verify_again, token_file.verify, lambda: TokenFile.open(path, verify=True)):
        with pytest.raises(CorruptFile, match=r"altered.*SHA-256"):
            verify()


def test_threads_that_read_at_the_same_time_verify_each_block_once(intact: Path) -> None:
    token_file = opened(intact)
    barrier = threading.Barrier(8)

    def read(number: int) -> bool:
        draw = np.random.default_rng(number % 2)
        barrier.wait()
        for _ in range(50):
            starts = draw.integers(0, token_file.n_tokens - 1, 16)
            token_file.windows(starts, 100)
        return True

    with hashed_blocks() as hashed, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(8)))
    assert sum(hashed) == os.path.getsize(intact)


def test_a_prefetched_batch_with_a_damaged_block_is_never_given(path: Path) -> None:
    flip_bit(path, 4 * BLOCK_BYTES)
    token_file = opened(path)
    batches = Batches(token_file, context_length=256, batch_size=1, seed=1)
    plain = Batches(TokenFile.open(path), context_length=256, batch_size=1, seed=1)
    bad = token_file.tokens[4 * BLOCK_TOKENS : 5 * BLOCK_TOKENS]
    fetcher = Prefetcher(batches)
    given, told = 0, ""
    while not told:
        try:
            fetcher[given]
            given += 1
        except CorruptFile as error:
            told = str(error)
    fetcher.close()
    assert "block 4 " in told

    def is_of_bad_block(index: int) -> bool:
        window = plain[index][0][0].numpy()[:200]
        return any((bad[at : at + 200] == window).all() for at in np.flatnonzero(bad[:-200] == window[0]))

    assert not any(is_of_bad_block(index) for index in range(given))
    assert given < 100


def test_a_file_that_is_altered_under_a_reader_is_verified_again_as_far_as_it_was_read(path: Path) -> None:
    os.utime(path, ns=(0, 0))
    token_file = opened(path)
    token_file.windows(np.array([0, 2 * BLOCK_TOKENS]), 100)
    guard = TokenGuard(token_file)
    os.utime(path, ns=(1, 1))
    with hashed_blocks() as hashed:
        guard.verify_unchanged()
        assert sum(hashed) == 2 * BLOCK_BYTES
        guard.verify_unchanged()
        assert sum(hashed) == 2 * BLOCK_BYTES
    # What was not read before is verified when it is.
    flip_bit(path, BLOCK_BYTES)
    guard.verify_unchanged()
    with pytest.raises(CorruptFile, match="block 1 "):
        token_file.windows(np.array([BLOCK_TOKENS]), 100)
    flip_bit(path, 2 * BLOCK_BYTES + 50_000)
    os.utime(path, ns=(2, 2))
    with pytest.raises(CorruptFile, match="block 2 "):
        guard.verify_unchanged()


def test_each_rank_verifies_the_blocks_of_its_own_rows(intact: Path) -> None:
    read: list[int] = []
    for rows in (slice(0, 1), slice(1, 2), slice(0, 2)):
        with hashed_blocks() as hashed:
            _ = Batches(opened(intact), context_length=64, batch_size=2, seed=6, rows=rows)[0]
        read.append(sum(hashed))
    assert read == [BLOCK_BYTES, BLOCK_BYTES, 2 * BLOCK_BYTES]


def test_one_damaged_block_among_many_that_threads_verify_is_told(tmp_path: Path) -> None:
    n_blocks = 40
    tokens = np.zeros(n_blocks * BLOCK_TOKENS, "<u2")
    checksums = BlockChecksums()
    checksums.update(tokens.data)
    sidecar = Sidecar(
        format="napkin-tokens",
        version=2,
        dtype="uint16",
        tokens=len(tokens),
        documents=1,
        text_bytes=1,
        vocab_size=257,
        tokenizer=BYTES.fingerprint,
        separator=256,
        sha256="0" * 64,
        block_bytes=BLOCK_BYTES,
        blocks=checksums.hexdigest(),
    )
    tokens[37 * BLOCK_TOKENS + 5] = 1
    token_file = TokenFile(tmp_path / "x.tokens", tokens, sidecar)
    token_file.verify_on_read()
    starts = np.arange(n_blocks) * BLOCK_TOKENS
    for _ in range(2):
        with pytest.raises(CorruptFile, match="block 37 "):
            token_file.windows(starts, 3)
    token_file.windows(starts[:37], 3)


def test_a_terabyte_is_opened_and_read_without_reading_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "zeros.tokens"
    size = 10**12
    path.touch()
    try:
        os.truncate(path, size)
    except OSError:
        pytest.skip("the file system has no files of a terabyte")
    n_whole, rest = divmod(size, BLOCK_BYTES)
    digests = [sha256(bytes(n)).hexdigest()[:16] for n in (BLOCK_BYTES, rest)]
    sidecar = Sidecar(
        format="napkin-tokens",
        version=2,
        dtype="uint16",
        tokens=size // 2,
        documents=1,
        text_bytes=size // 2,
        vocab_size=257,
        tokenizer=BYTES.fingerprint,
        separator=256,
        sha256="0" * 64,
        block_bytes=BLOCK_BYTES,
        blocks=digests[0] * n_whole + digests[1],
    )
    sidecar_path(path).write_bytes(sidecar.to_json())
    assert sidecar_path(path).stat().st_size < 32e6
    with hashed_blocks() as hashed:
        token_file = opened(path)
        batches = Batches(token_file, context_length=1024, batch_size=8, seed=0)
        assert not hashed
        for index in range(3):
            assert batches[index][0].sum() == 0
    assert 0 < sum(hashed) <= 3 * 8 * 2 * BLOCK_BYTES
    last = np.array([token_file.n_tokens - 5])
    assert token_file.windows(last, 10).tolist() == [[0] * 10]
