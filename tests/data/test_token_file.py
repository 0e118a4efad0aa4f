import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napkin.data import Document, TokenFile, write_token_file
from napkin.errors import CorruptFile, NapkinError
from napkin.tokenizer import ByteTokenizer, CharacterTokenizer, Tokenizer

BYTES = ByteTokenizer(["<|endoftext|>"])
DOCUMENTS = [Document("one", "Once upon"), Document("two", "a time\r\n"), Document("three", "grün <|endoftext|>")]
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_token_file(tmp_path / "x.tokens", DOCUMENTS, BYTES)
    return tmp_path / "x.tokens"


@settings(max_examples=40)
@given(st.lists(TEXT, min_size=1))
def test_documents_come_back_byte_for_byte(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.mktemp("tokens") / "x.tokens"
    documents = [Document(str(i), text) for i, text in enumerate(texts)]
    token_file = write_token_file(path, iter(documents), BYTES)
    token_file.verify()
    ids = token_file.tokens
    assert ids[0] == ids[-1] == 256 == token_file.separator
    (borders,) = np.nonzero(ids == 256)
    found = [bytes(ids[a + 1 : b].tolist()) for a, b in pairwise(borders)]
    assert found == [text.encode() for text in texts]
    assert token_file.n_documents == len(texts)
    assert token_file.text_bytes == sum(len(text.encode()) for text in texts)
    assert token_file.n_tokens == len(ids) == token_file.text_bytes + len(texts) + 1
    assert token_file.vocab_size == 257


def test_the_file_is_little_endian_uint16_beside_a_sidecar_that_describes_it(path: Path) -> None:
    expected = [256, *b"Once upon", 256, *b"a time\r\n", 256, *"grün <|endoftext|>".encode(), 256]
    data = b"".join(i.to_bytes(2, "little") for i in expected)
    assert path.read_bytes() == data
    assert json.loads(path.with_name("x.tokens.json").read_text()) == {
        "format": "napkin-tokens",
        "version": 2,
        "dtype": "uint16",
        "tokens": len(expected),
        "documents": 3,
        "text_bytes": 9 + 8 + 19,
        "vocab_size": 257,
        "tokenizer": BYTES.fingerprint,
        "separator": 256,
        "sha256": sha256(data).hexdigest(),
        "block_bytes": 2**19,
        "blocks": sha256(data).hexdigest()[:16],
    }
    assert sorted(os.listdir(path.parent)) == ["x.tokens", "x.tokens.json"]


@pytest.mark.parametrize(("n_characters", "width"), [(2**16 - 1, 2), (2**16, 4)])
def test_ids_take_two_bytes_up_to_a_vocabulary_of_65536_and_four_beyond(
    tmp_path: Path, n_characters: int, width: int
) -> None:
    tokenizer = CharacterTokenizer("".join(map(chr, range(0x10000, 0x10000 + n_characters))), ["<|endoftext|>"])
    text = chr(0x10000) + chr(0x10000 + n_characters - 1)
    token_file = write_token_file(tmp_path / "x.tokens", [Document("x", text)], tokenizer)
    token_file.verify()
    expected = [n_characters, 0, n_characters - 1, n_characters]
    assert token_file.tokens.tolist() == expected
    assert token_file.path.read_bytes() == b"".join(i.to_bytes(width, "little") for i in expected)


def test_tokens_cannot_be_written_through_the_map(path: Path) -> None:
    tokens = TokenFile.open(path).tokens
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_progress_is_told_growing_totals_every_few_megabytes(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    documents = [*DOCUMENTS, Document("long", "a" * 5_000_000), Document("short", "b")]
    write_token_file(tmp_path / "x.tokens", documents, BYTES, lambda *totals: told.append(totals))
    assert told == [(5_000_036, 5_000_040), (5_000_037, 5_000_042)]


@pytest.mark.parametrize("change", [-2, -1, 1, 2])
def test_a_shortened_or_grown_file_is_refused_with_both_sizes(path: Path, change: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + bytes(change))
    with pytest.raises(CorruptFile, match=f"{len(data) + change} bytes.*sidecar says {len(data)}"):
        TokenFile.open(path)
    path.write_bytes(b"")
    with pytest.raises(CorruptFile, match="is 0 bytes long"):
        TokenFile.open(path)


@settings(max_examples=40)
@given(st.data())
def test_one_altered_bit_is_found_by_verify(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("tokens") / "x.tokens"
    write_token_file(path, DOCUMENTS, BYTES)
    content = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    token_file = TokenFile.open(path)
    with pytest.raises(CorruptFile, match=r"altered.*SHA-256"):
        token_file.verify()
    with pytest.raises(CorruptFile, match="was altered"):
        TokenFile.open(path, verify=True)


def test_the_tokens_of_another_tokenizer_are_refused(path: Path) -> None:
    other = ByteTokenizer(["<|endoftext|>", "<|pad|>"]).fingerprint
    expected = f"was made by another tokenizer: expects {BYTES.fingerprint}, got {other}"
    with pytest.raises(NapkinError, match=expected):
        TokenFile.open(path, tokenizer_fingerprint=other)
    assert TokenFile.open(path, tokenizer_fingerprint=BYTES.fingerprint).n_documents == 3


def test_a_missing_file_or_sidecar_is_told(path: Path) -> None:
    sidecar = path.with_name("x.tokens.json")
    sidecar.rename(path.with_name("kept.json"))
    with pytest.raises(NapkinError, match=r"x\.tokens\.json' is missing"):
        TokenFile.open(path)
    path.rename(path.with_name("kept"))
    with pytest.raises(NapkinError, match=r"x\.tokens' does not exist"):
        TokenFile.open(path)
    path.with_name("kept.json").rename(sidecar)
    with pytest.raises(NapkinError, match=r"x\.tokens'.*\(No such"):
        TokenFile.open(path)


def changed(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda sidecar: {**sidecar, **fields}


@pytest.mark.parametrize(
    "change",
    [
        changed(comment="unknown"),
        changed(format="other"),
        changed(version=3),
        changed(version=1),
        changed(version=1, block_bytes=None),
        changed(block_bytes=2**20),
        changed(block_bytes=0),
        changed(blocks=""),
        changed(blocks="0" * 15),
        changed(blocks="0" * 32),
        changed(blocks="g" * 16),
        changed(blocks="ab " * 4 + "abcd"),
        changed(blocks=["0" * 16]),
        changed(blocks=None),
        changed(tokens=10**30),
        changed(tokens=2**61),
        changed(documents=2**63),
        changed(text_bytes=10**400),
        changed(text_bytes=float("nan")),
        changed(vocab_size=float("inf")),
        changed(vocab_size=-257),
        changed(vocab_size=2**40, dtype="uint32"),
        changed(vocab_size={"a": [257]}),
        changed(separator=10**20),
        changed(tokenizer="a" * 64 + "\n"),
        changed(tokenizer="\x1b[2J" + "a" * 60),
        changed(**{"a\nb" * 10_000: 1}),
        changed(version="1"),
        changed(dtype="int16"),
        changed(dtype="uint32"),
        changed(tokens="39"),
        changed(tokens=40.0),
        changed(tokens=-1),
        changed(tokens=3),
        changed(documents=0),
        changed(documents=True),
        changed(text_bytes=None),
        changed(vocab_size=256),
        changed(vocab_size=70_000),
        changed(separator=-1),
        changed(tokenizer=5),
        changed(sha256="ABC"),
        lambda sidecar: {key: value for key, value in sidecar.items() if key != "sha256"},
        lambda sidecar: [sidecar],
    ],
)
def test_a_sidecar_with_wrong_fields_is_refused(path: Path, change: Callable[[Any], Any]) -> None:
    sidecar = path.with_name("x.tokens.json")
    sidecar.write_text(json.dumps(change(json.loads(sidecar.read_text()))))
    with pytest.raises(CorruptFile, match=r"describe.*token") as caught:
        TokenFile.open(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "[" * 1_000_000,
        '{"format": ' + "[" * 50_000,
        '{"tokens": ' + "9" * 30_000,
        '{"a": ' * 10_000,
        '{"blocks": ' + '["' * 30_000,
        "\ud800x",
    ],
    ids=["lists", "lists in a field", "a long number", "objects", "lists of blocks", "no UTF-8"],
)
def test_a_hostile_sidecar_is_refused_in_one_line(path: Path, content: str) -> None:
    path.with_name("x.tokens.json").write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(CorruptFile, match=r"describe.*token") as caught:
        TokenFile.open(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500 + 2 * len(str(path))


def test_of_a_sidecar_no_more_is_read_than_its_tokens_explain(path: Path) -> None:
    sidecar = path.with_name("x.tokens.json")
    content = json.loads(sidecar.read_text())
    os.truncate(sidecar, 2**40)
    with pytest.raises(CorruptFile, match=r"longer.*\d+.*'x\.tokens'"):
        TokenFile.open(path)
    sidecar.write_text(json.dumps(content | {"blocks": "0" * 10_000_000}))
    with pytest.raises(CorruptFile, match="it is longer than"):
        TokenFile.open(path)


def test_the_vocabulary_of_a_sidecar_is_its_tokenizer_s(path: Path) -> None:
    TokenFile.open(path).refuse_other_vocabulary(BYTES)
    for fields in ({"vocab_size": 65_000}, {"separator": 5}):
        forge(path, [256, 1, 256], documents=1, **fields)
        with pytest.raises(CorruptFile, match=r"tokenizer 257.*256: make"):
            TokenFile.open(path).refuse_other_vocabulary(BYTES)


@given(st.binary())
def test_a_sidecar_of_any_other_bytes_is_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("tokens") / "x.tokens"
    path.write_bytes(b"\0\0")
    path.with_name("x.tokens.json").write_bytes(data)
    with pytest.raises(CorruptFile, match=r"describe.*token"):
        TokenFile.open(path)


def forge(path: Path, ids: list[int], **fields: Any) -> None:
    """Change tokens and sidecar together, checksum included, as only a faulty writer would."""
    sidecar = path.with_name("x.tokens.json")
    data = b"".join(i.to_bytes(2, "little") for i in ids)
    content = json.loads(sidecar.read_text())
    path.write_bytes(data)
    digest = sha256(data).hexdigest()
    content |= {"tokens": len(ids), "sha256": digest, "blocks": digest[:16], **fields}
    sidecar.write_text(json.dumps(content))


def test_verify_refuses_ids_outside_the_vocabulary(path: Path) -> None:
    forge(path, [256, 257, 256], documents=1)
    with pytest.raises(CorruptFile, match=r"holds token 257.*vocabulary.*256"):
        TokenFile.open(path, verify=True)


def test_verify_refuses_another_number_of_documents(path: Path) -> None:
    forge(path, [256, 1, 256], documents=1)
    TokenFile.open(path).verify()
    forge(path, [256, 1, 256], documents=2)
    with pytest.raises(CorruptFile, match=r"holds 2 separators.*2 documents.*3"):
        TokenFile.open(path, verify=True)


@pytest.mark.parametrize("existing", ["x.tokens", "x.tokens.json"])
def test_neither_of_the_two_files_is_overwritten(tmp_path: Path, existing: str) -> None:
    (tmp_path / existing).write_text("mine")

    def unread() -> Any:
        raise AssertionError("refused only after reading documents")
        yield

    with pytest.raises(NapkinError, match=f"{existing}'.*overwritten"):
        write_token_file(tmp_path / "x.tokens", unread(), BYTES)
    assert os.listdir(tmp_path) == [existing]
    assert (tmp_path / existing).read_text() == "mine"


@pytest.mark.parametrize(
    ("documents", "tokenizer", "message"),
    [
        ([], BYTES, "no documents to write"),
        (DOCUMENTS, ByteTokenizer(), "has no <|endoftext|>"),
        ([*DOCUMENTS, Document("bad", "\ud800")], BYTES, "'bad' contains a lone surrogate"),
        (DOCUMENTS, CharacterTokenizer("Onceup a", ["<|endoftext|>"]), "character 'o'"),
    ],
)
def test_what_cannot_be_tokenized_leaves_no_file(
    tmp_path: Path, documents: list[Document], tokenizer: Tokenizer, message: str
) -> None:
    with pytest.raises(NapkinError) as caught:
        write_token_file(tmp_path / "x.tokens", documents, tokenizer)
    assert message in str(caught.value)
    assert os.listdir(tmp_path) == []


class ForgetfulTokenizer(ByteTokenizer):
    """Takes the letter z for the separator, and y for an id that does not exist."""

    def encode_to_numpy(self, text: str) -> np.ndarray:
        return np.array([{"z": 256, "y": 257}.get(letter, 0) for letter in text])


@pytest.mark.parametrize("letter", ["z", "y"])
def test_a_tokenizer_that_forges_separators_or_leaves_its_vocabulary_is_refused(tmp_path: Path, letter: str) -> None:
    with pytest.raises(NapkinError, match=r"'odd' encodes.*<\|endoftext\|>"):
        write_token_file(tmp_path / "x.tokens", [Document("odd", f"a{letter}")], ForgetfulTokenizer(["<|endoftext|>"]))
    assert os.listdir(tmp_path) == []


WRITER = """
import itertools, os, signal, sys
from napkin.data.corpus import Document
from napkin.data.token_writer import write_token_file
from napkin.tokenizer import ByteTokenizer
tokenizer = ByteTokenizer(["<|endoftext|>"])
"""


def test_a_writer_killed_in_the_middle_leaves_nothing_that_opens(tmp_path: Path) -> None:
    script = f"""{WRITER}
def documents():
    for i in itertools.count():
        if i == 2000:
            print("writing", flush=True)
        yield Document(str(i), "x" * 10_000)
write_token_file(sys.argv[1], documents(), tokenizer)
"""
    path = tmp_path / "x.tokens"
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        writer.send_signal(signal.SIGKILL)
    assert writer.returncode == -signal.SIGKILL
    left = os.listdir(tmp_path)
    assert all(name.startswith(".x.tokens.") and name.endswith(".tmp") for name in left)
    assert max((tmp_path / name).stat().st_size for name in left) > 1_000_000
    with pytest.raises(NapkinError, match="does not exist"):
        TokenFile.open(path)
    write_token_file(path, DOCUMENTS, BYTES).verify()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_writer_killed_at_any_file_operation_leaves_a_whole_file_or_none(tmp_path: Path) -> None:
    # Writer number k is killed just before its k-th operation, until one lives to the end.
    script = f"""{WRITER}
def kill_at(k):
    operations = itertools.count()
    def hook(event, args):
        if event in ("open", "os.link", "os.rename", "os.remove", "mmap.__new__") and next(operations) == k:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
for k in itertools.count():
    folder = f"{{sys.argv[1]}}/{{k}}"
    os.mkdir(folder)
    if not (child := os.fork()):
        kill_at(k)
        write_token_file(f"{{folder}}/x.tokens", [Document("x", "text")], tokenizer)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status)
    if status != -signal.SIGKILL:
        break
"""
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    *killed, survived = map(int, result.stdout.split())
    assert survived == 0
    whole: list[bool] = []
    refusals: set[str] = set()
    for k in range(len(killed) + 1):
        try:
            token_file = TokenFile.open(tmp_path / str(k) / "x.tokens", verify=True)
        except NapkinError as error:
            refusals.add(str(error).split("'")[2].split(":")[0])
            whole.append(False)
        else:
            assert token_file.tokens.tolist() == [256, *b"text", 256]
            whole.append(True)
    assert refusals == {" does not exist", " is missing, without it "}
    # At least: two files created, one of the two named, both named.
    assert whole.count(False) >= 4
    assert whole == sorted(whole)
    assert whole[-1]
