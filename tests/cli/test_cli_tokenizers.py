"""`napkin tokenizer`: every kind is trained and used; compare, show, import, export."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from napkin.data.token_file import SEPARATOR, TokenFile
from napkin.tokenizer.bpe_training import train_bpe
from napkin.tokenizer.inspection import printable
from napkin.tokenizer.interchange import read_huggingface, read_tiktoken, write_huggingface
from napkin.tokenizer.tokenizer_file import load_tokenizer
from napkin.tokenizer.word_level import WordTokenizer

pytestmark = pytest.mark.usefixtures("place")

TOKENIZER = "data/tokenizer.json"


@pytest.mark.parametrize("kind", ["bpe", "words", "characters", "bytes"])
def test_every_kind_is_trained_and_its_tokens_are_the_text(napkin, kind: str) -> None:
    size = ["--vocab-size", "300"] if kind in ("bpe", "words") else []
    trained = napkin("tokenizer", "train", "docs", "--kind", kind, *size, "--out", "new/tokenizer.json")
    assert trained.status == 0
    assert trained.out.splitlines()[1].startswith(" byte-level BPE" if kind == "bpe" else f" {kind}")
    done = napkin("tokenizer", "encode", "docs", "--tokenizer", "new/tokenizer.json", "--out", "new")
    assert done.status == 0

    tokenizer = load_tokenizer("new/tokenizer.json")
    assert tokenizer.kind == kind
    tokens = TokenFile.open("new/train.tokens", tokenizer_fingerprint=tokenizer.fingerprint, verify=True)
    text = tokenizer.decode([i for i in tokens.tokens.tolist() if i != tokens.separator])
    lost = [document for document in text.split("Document") if "<|unk|>" in document]
    assert "fox 3 jumps over 21 lazy dogs. Café 🦊\n" in text or lost
    assert bool(lost) is ("<|unk|>" in done.out)


def test_what_unknown_words_cost_is_told_and_right(napkin) -> None:
    Path("half.txt").write_text("known " * 10 + "unknown other")
    WordTokenizer(["known", " known", " "], [SEPARATOR]).save("words.json")
    arguments = "tokenizer encode half.txt --tokenizer words.json --out new --validation-fraction 0".split()
    # 12 words: the last two are unknown, " unknown other" is 14 of 73 bytes.
    line = napkin(*arguments).out.splitlines()[1]
    assert line.startswith("words that the tokenizer does not know: 16.7% of the tokens are <|unk|>")
    assert line.endswith("and 19.2% of the bytes are lost in them")
    figures = json.loads(napkin(*arguments, "--out", "again", "--json").out)["training"]
    assert figures["unknown_tokens"] == pytest.approx(2 / 12)
    assert figures["lost_bytes"] == pytest.approx(14 / 73)


@pytest.mark.thorough
def test_a_run_on_words_is_trained_and_generates_but_has_no_bits_a_byte(napkin, refusal) -> None:
    assert napkin(*"tokenizer train docs --kind words --vocab-size 30 --out new/tokenizer.json".split()).status == 0
    assert napkin(*"tokenizer encode docs --tokenizer new/tokenizer.json --out new".split()).status == 0
    data = [f"--data.{name}=new/{file}" for name, file in (("train", "train.tokens"), ("tokenizer", "tokenizer.json"))]
    assert (
        napkin("train", "tiny.toml", "--run", "new/run", *data, "--data.validation=new/validation.tokens").status == 0
    )
    assert napkin("generate", "new/run", "--tokens", "5", "--prompts", "the unheard-of").status == 0
    line = refusal("evaluate", "new/run")
    assert re.search(r"\d+ of the \d+ tokens of 'new/validation.tokens' are words that .* bits per byte", line)


@pytest.mark.thorough
def test_words_that_are_all_known_have_bits_a_byte(napkin) -> None:
    assert napkin(*"tokenizer train one.txt --kind words --out new/tokenizer.json".split()).status == 0
    assert napkin(*"tokenizer encode one.txt --tokenizer new/tokenizer.json --out new".split()).status == 0
    data = [f"--data.{name}=new/{file}" for name, file in (("train", "train.tokens"), ("tokenizer", "tokenizer.json"))]
    assert (
        napkin("train", "tiny.toml", "--run", "new/run", *data, "--data.validation=new/validation.tokens").status == 0
    )
    assert json.loads(napkin("evaluate", "new/run", "--json").out)["bits_per_byte"] > 0


def test_compare_shows_the_four_kinds_and_any_other_on_the_same_text(napkin) -> None:
    text = "Hello, 🌍! 你好!"
    done = json.loads(napkin("tokenizer", "compare", text, "--with", TOKENIZER, "--learn-from", "docs", "--json").out)

    rows = {row["name"]: row for row in done["tokenizers"]}
    assert [row["kind"] for row in rows.values()] == ["characters", "bytes", "words", "bpe", "bpe"]
    assert (done["characters"], done["bytes"], done["text"]) == (13, 20, None)
    assert rows["bytes"]["bytes_per_token"] == 1
    assert rows["characters"]["bytes_per_token"] == pytest.approx(1.538, abs=5e-4)
    assert rows["characters"]["first_tokens"] == list(text)
    assert rows[TOKENIZER]["tokens"] == len(load_tokenizer(TOKENIZER).encode(text))
    assert "".join(rows["words"]["first_tokens"]) != text
    assert rows["words"]["lost_bytes"] > 0.5


def test_without_a_terminal_tokens_are_divided_by_a_mark(napkin) -> None:
    done = napkin("tokenizer", "compare", "one.txt", "--show", "20", "--with", TOKENIZER)

    assert done.err == ""
    assert "text: one.txt, 13,500 characters, 13.5 kB in UTF-8, 27.0 kB in UTF-16, 54.0 kB in UTF-32" in done.out
    assert "vocabularies learned from itself" in done.out
    assert "\nwords\nthe| cat| sat| on| the|...\n" in done.out
    assert "\ncharacters\nt|h|e| |c|a|t| |s|a|t| |o|n| |t|h|e|...\n" in done.out


def test_what_a_tokenizer_cannot_encode_is_a_line_beside_the_others(napkin) -> None:
    napkin("tokenizer", "train", "one.txt", "--kind", "characters", "--out", "letters.json")
    done = napkin("tokenizer", "compare", "the 🦊", "--learn-from", "docs", "--with", "letters.json")

    assert done.status == 0
    assert "\nletters.json: character '🦊' (U+1F98A) is not among the" in done.out


def test_no_byte_of_a_text_steers_the_terminal(napkin) -> None:
    text = "a\x1b[31mb\x07\tc\r\n\u202ed\x9b0m\u2028"
    Path("hostile.txt").write_bytes(text.encode())
    for given in (text, "hostile.txt"):
        done = napkin("tokenizer", "compare", given, "--learn-from", "docs", "hostile.txt")
        assert all(each.isprintable() for line in done.out.split("\n") for each in line), given
    assert r"\x1b|[|3|1|m|b|\x07|→|c|␍|↵|\u202e|d" in done.out
    assert r"\xe2|\x80|\xae" in done.out


def test_every_token_is_shown_in_characters_that_print() -> None:
    for token in [*(bytes([i]) for i in range(256)), "é".encode(), b"a\xc3", "\u200b\U0001f98a".encode()]:
        assert printable(token).isprintable(), token
        assert printable(token), token


@pytest.mark.thorough
def test_on_a_terminal_tokens_are_coloured_and_no_character_is_dropped() -> None:
    command = [sys.executable, "-m", "napkin", "tokenizer", "compare", "one.txt", "--show", "300"]
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "60"}
    environment.pop("NO_COLOR", None)
    done = subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout
    words = done.partition("words\x1b[0m\n")[2].partition("\n\n")[0]
    lines = re.sub(r"\x1b\[[0-9;]*m", "", words).split("\n")

    assert re.findall(r"\x1b\[30;\d+m the", words)
    assert all(len(line) <= 60 for line in lines)
    assert "".join(lines).removesuffix(" ...").replace("↵", "\n") in Path("one.txt").read_text()
    colourless = subprocess.run(
        command, env={**environment, "NO_COLOR": "1"}, capture_output=True, check=True, text=True
    )
    assert "the| cat| sat" in colourless.stdout


def test_show_tells_longest_tokens_and_merges_in_order(napkin) -> None:
    tokenizer = train_bpe(["aaaa bb aaaa bb cc"], 261, [SEPARATOR])
    tokenizer.save("small.json")

    told = json.loads(napkin("tokenizer", "show", "small.json", "--longest", "2", "--merges", "1", "--json").out)
    printed = napkin("tokenizer", "show", "small.json", "--longest", "2", "--merges", "1").out

    vocabulary = tokenizer.vocabulary[:-1]
    longest = sorted(range(len(vocabulary)), key=lambda i: (-len(vocabulary[i]), i))[:2]
    assert [token["id"] for token in told["longest_tokens"]] == longest
    assert [merge["merge"] for merge in told["merges"]] == [0, 3]
    assert told["merges"][0]["ids"] == [97, 97, 256]
    assert "small.json: bpe, 261 ids, 4 merges, pattern gpt2" in printed
    assert re.search(r"0 +'a' +'a' +256 +'aa' *\n +\.\.\. *\n +3 ", printed)


def test_a_word_is_built_up_to_what_encode_gives(napkin) -> None:
    tokenizer = load_tokenizer(TOKENIZER)
    told = json.loads(napkin("tokenizer", "show", TOKENIZER, "--word", "jumps over", "--json").out)
    printed = napkin("tokenizer", "show", TOKENIZER, "--word", "jumps over").out

    assert [piece["pre_token"] for piece in told] == ["jumps", " over"]
    assert [i for piece in told for i in piece["steps"][-1]["ids"]] == tokenizer.encode("jumps over")
    for piece in told:
        lengths = [len(step["ids"]) for step in piece["steps"]]
        assert lengths == list(range(lengths[0], lengths[-1] - 1, -1))
        assert all("".join(step["tokens"]) == piece["pre_token"] for step in piece["steps"])
    assert "'jumps' becomes" in printed
    assert "j|u|m|p|s" in printed


def test_other_kinds_are_shown_without_merges(napkin) -> None:
    WordTokenizer(["a", "bcd"], [SEPARATOR]).save("words.json")
    done = napkin("tokenizer", "show", "words.json")

    assert "words.json: words, 4 ids\nspecial tokens: <|unk|> 2, <|endoftext|> 3\n" in done.out
    assert "'bcd'" in done.out
    assert "joins" not in done.out


def test_what_is_exported_is_imported_again(napkin) -> None:
    fingerprint = load_tokenizer(TOKENIZER).fingerprint
    for form, path in (("huggingface", "hf/tokenizer.json"), ("tiktoken", "ranks.tiktoken"), ("gpt2", "gpt2")):
        done = napkin("tokenizer", "export", TOKENIZER, "--format", form, "--out", path)
        assert done.status == 0
        assert "300 ids, the same as napkin's" in done.out
        told = ["--pattern", "gpt2", "--special", SEPARATOR] if form == "tiktoken" else []
        back = napkin("tokenizer", "import", path, "--out", f"back/{form}.json", *told)
        assert back.status == 0
        assert f"read as {form}: 300 ids, 43 merges, pattern gpt2, special tokens: <|endoftext|>" in back.out
        assert load_tokenizer(f"back/{form}.json").fingerprint == fingerprint
    assert napkin("tokenizer", "import", "gpt2/merges.txt", "gpt2/vocab.json", "--out", "b.json", "--json").err == ""
    assert load_tokenizer("b.json").fingerprint == fingerprint
    assert (
        json.loads(napkin("tokenizer", "export", TOKENIZER, "--out", "c.json", "--json").out)["format"] == "huggingface"
    )
    assert read_huggingface("c.json").fingerprint == fingerprint
    assert read_tiktoken("ranks.tiktoken", pattern="gpt2", special_tokens=[SEPARATOR]).fingerprint == fingerprint


def test_special_tokens_are_named_with_and_without_ids(napkin) -> None:
    napkin("tokenizer", "export", TOKENIZER, "--format", "tiktoken", "--out", "ranks")
    special = ["--special", "<a=b>", "<|x|>=305", SEPARATOR]
    done = napkin("tokenizer", "import", "ranks", "--pattern", "cl100k", *special, "--out", "t.json", "--json")

    tokens = json.loads(done.out)["special_tokens"]
    assert (tokens["<a=b>"], tokens["<|x|>"], tokens[SEPARATOR], len(tokens)) == (299, 305, 306, 8)


def test_a_tokenizer_without_a_separator_is_imported_with_a_hint(napkin) -> None:
    write_huggingface(train_bpe(["the cat"], 260, []), "bare.json")
    assert "add it with --special '<|endoftext|>'" in napkin("tokenizer", "import", "bare.json", "--out", "a.json").out
    done = napkin("tokenizer", "import", "bare.json", "--special", SEPARATOR, "--out", "b.json")
    assert "--special" not in done.out
    assert napkin(*"tokenizer encode docs --tokenizer b.json --out new".split()).status == 0


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("tokenizer trian docs", r"there is no command 'tokenizer trian': did you mean `napkin tokenizer train`\?"),
        ("tokenizer zzz", "there is no command 'tokenizer zzz': `napkin tokenizer --help` lists them"),
        ("tokenizer train docs --kind letters --out new.json", "invalid choice 'letters' for argument '--kind'"),
        ("tokenizer train docs --kind bytes --vocab-size 300 --out new.json", "--vocab-size is not for --kind bytes"),
        ("tokenizer train docs --kind characters --pattern gpt2 --out new.json", "--pattern is not for --kind char"),
        ("tokenizer train docs --kind words --vocab-size 2 --out new.json", "vocab_size 2 is below 3"),
        ("tokenizer train docs --vocab-size 0 --out new.json", "vocab_size 0 is outside 257"),
        ("tokenizer compare", "missing from napkin tokenizer compare: TEXT"),
        ("tokenizer compare docs --show -1", "--show is -1: use 0 to 10,000 characters"),
        ("tokenizer compare docs --vocab-size 1", "vocab_size 1 is below 3"),
        ("tokenizer compare docs --with none.json", "none.json cannot be read"),
        ("tokenizer compare docs --with one.txt", "one.txt is not an intact tokenizer file"),
        ("tokenizer compare docs --learn-from none", "'none' does not exist"),
        ("tokenizer compare runs/tiny/checkpoints/step-00000006/model.safetensors", "is not UTF-8 at byte"),
        ("tokenizer show", "missing from napkin tokenizer show: PATH"),
        ("tokenizer show none.json", "none.json cannot be read"),
        ("tokenizer show data/tokenizer.json --merges -1", "--merges is -1: use 0 or more"),
        ("tokenizer show data/tokenizer.json --word=", "--word has 0 characters: use 1 to 1,000"),
        (
            "tokenizer import",
            "no files are given: name a tokenizer.json, a .tiktoken file, or vocab.json and merges.txt",
        ),
        ("tokenizer import a b c --out new.json", "3 files are given"),
        ("tokenizer import none.json --out new.json", "'none.json' cannot be read"),
        ("tokenizer import docs --out new.json", "'docs/vocab.json' cannot be read"),
        ("tokenizer import one.txt", "'data/tokenizer.json' exists and is not overwritten"),
        (
            "tokenizer import one.txt --out new.json",
            "a .tiktoken file does not say how text is split: name its --pattern",
        ),
        ("tokenizer import one.txt --pattern gpt2 --out new.json", "'one.txt' cannot be used: line 1 is 'the cat sat"),
        ("tokenizer import one.txt --format gpt2 --out new.json", "--format gpt2 reads two files, 1 given"),
        ("tokenizer import data/tokenizer.json --out new.json", "missing required field `model`"),
        ("tokenizer import one.txt --pattern gpt2 --drop-template --out new.json", "--drop-template is for tokenizer"),
        (
            "tokenizer import one.txt one.txt --out new.json",
            "'one.txt' and 'one.txt' cannot be used: it is not",
        ),
        ("tokenizer export none.json --out new", "none.json cannot be read"),
        ("tokenizer export data/tokenizer.json", "no file to write is named: give --out PATH"),
        ("tokenizer export data/tokenizer.json --out one.txt", "'one.txt' exists and is not overwritten"),
        ("tokenizer export data/tokenizer.json --out one.txt --format gpt2", "the folder 'one.txt' cannot be made"),
        ("tokenizer export data/tokenizer.json --out new --format onnx", "invalid choice 'onnx'"),
    ],
)
def test_a_wrong_command_is_refused_with_the_way_out(refusal, command: str, line: str) -> None:
    assert re.search(line, refusal(*command.split(" ")))


def test_only_bpe_is_exported_and_built_up(refusal) -> None:
    WordTokenizer(["a"], [SEPARATOR]).save("words.json")
    assert "of kind 'words' has no merges" in refusal("tokenizer", "export", "words.json", "--out", "new")
    assert "of kind 'words' has no merges: use one of kind 'bpe'" in refusal(
        "tokenizer", "show", "words.json", "--word", "a"
    )


def test_a_separator_within_a_line_is_told_and_may_be_a_boundary(napkin) -> None:
    Path("inline.txt").write_text("one<|endoftext|>two<|endoftext|>three\n")
    encode = "tokenizer encode inline.txt --validation-fraction 0".split()
    told = napkin(*encode, "--tokenizer", TOKENIZER, "--out", "text")
    assert told.status == 0
    assert "'inline.txt': <|endoftext|> within a line was encoded as text" in told.err
    assert TokenFile.open("text/train.tokens").n_documents == 1
    divided = napkin(*encode, "--tokenizer", TOKENIZER, "--out", "divided", "--inline-boundaries")
    assert divided.status == 0
    assert "within a line" not in divided.err
    assert TokenFile.open("divided/train.tokens").n_documents == 3


@pytest.mark.parametrize("wanted", ["huggingface", "gpt2", "tiktoken", "folder of a run"])
def test_what_napkin_exports_it_imports_again(napkin, place: Path, wanted: str) -> None:
    out = Path("out") / ("tokenizer.json" if wanted == "huggingface" else "t.tiktoken" if wanted == "tiktoken" else "")
    if wanted == "folder of a run":
        done = napkin("export", "runs/tiny", "--out", str(out))
    else:
        done = napkin("tokenizer", "export", TOKENIZER, "--format", wanted, "--out", str(out))
    assert done.status == 0, done.err
    told = re.search(r"napkin (tokenizer import .*)", done.out)
    command = shlex.split(told[1]) if told else ["tokenizer", "import", str(out)]
    assert napkin(*command, "--out", "again.json").status == 0
    assert load_tokenizer("again.json").fingerprint == load_tokenizer(TOKENIZER).fingerprint
