"""Documents that a model writes: beside draws by the whole model, their provenance, the rules, and killed pipelines."""

import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import napkin
from napkin.chats.read_conversations import read_chats
from napkin.curation import Dropped, InputOptions, OutputOptions, Pipeline, Record, curate
from napkin.curation.engine.corpus_plan import plan_corpus
from napkin.curation.registry import make_stage
from napkin.errors import NapkinError
from napkin.inference.synthetic_documents import (
    ANSWER,
    ASK,
    PROMPTS,
    Conversations,
    Rephrase,
    _copied,
    _Tally,
    _written,
    passages_of,
)
from napkin.model.config import ModelConfig
from napkin.model.huggingface.convert import save_huggingface
from napkin.model.huggingface.folder_files import TextForm
from napkin.model.transformer import Transformer
from napkin.tokenizer.bpe import BPETokenizer

END, ASSISTANT = "<|end|>", "<|assistant|>"
TEMPLATE = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}<|assistant|>"
TOKENIZER = BPETokenizer([], [END, ASSISTANT])
LETTERS = "abcdef"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model that writes words of six letters, some of which end in a question mark; what it draws
    depends a little on all that it has read."""
    config = ModelConfig(
        vocab_size=TOKENIZER.vocab_size, context_length=512, d_model=288, n_layers=1, n_heads=4, tie_embeddings=False
    )
    made = Transformer(config, seed=5)
    ids = {**{chr(n): n for n in range(256)}, **TOKENIZER.special_tokens}
    follows = torch.full((config.vocab_size, config.vocab_size), -40.0)
    words = [*((letter, LETTERS + LETTERS + " .?") for letter in LETTERS), (" ", LETTERS), (ASSISTANT, LETTERS)]
    for before, after in [*words, (".", [END, " "]), ("?", [END])]:
        for each in after:
            follows[ids[each], ids[before]] = 0
    with torch.no_grad():
        made.embedding.weight.copy_(4 * torch.eye(config.vocab_size, config.d_model))
        made.head_weight.zero_()
        made.head_weight[:, : config.vocab_size] = follows / config.d_model**0.5
    folder = tmp_path_factory.mktemp("model") / "writer"
    form = TextForm([], [END], TEMPLATE)
    save_huggingface(made, folder, tokenizer=TOKENIZER, form=form)
    return str(folder)


TEXT = "The cat sat. The dog looked at it and went away.\n\nIt rained all day long, and so they stayed inside."


def plainly(model: str, text: str, most: int) -> tuple[str, bool]:
    """The likeliest tokens after a message, by the whole model for each, and whether it ended."""
    opened = napkin.load(model)
    ids = [*text.encode(), *(TOKENIZER.special_tokens[each] for each in (END, ASSISTANT))]
    drawn: list[int] = []
    for _ in range(most):
        with torch.no_grad():
            token = int(opened.model(torch.tensor([[*ids, *drawn]]))[0, -1].argmax())
        if token == TOKENIZER.special_tokens[END]:
            return bytes(drawn).decode(), True
        drawn.append(token)
    return bytes(drawn).decode(), False


def test_greedy_texts_are_those_of_the_whole_model(model: str) -> None:
    stage, told = Rephrase(model, max_tokens=12, temperature=0.0), _Tally()
    prompts = [f"{PROMPTS['medium']}\n\n{passage}" for passage in TEXT.split("\n\n")]
    found = _written(stage, [(prompt, 0) for prompt in prompts], told)
    plain = [plainly(model, prompt, 12) for prompt in prompts]
    assert [each.text for each in found] == [text.strip() for text, _ in plain]
    assert [each.rule == "not finished" for each in found] == [not ended for _, ended in plain]
    assert told.tokens == sum(len(text) + ended for text, ended in plain)


def test_a_document_says_where_it_comes_from_and_what_it_took(model: str) -> None:
    stage = Rephrase(model, style="easy", passage_characters=60, max_tokens=100, temperature=1.0, seed=7, least=0)
    found = stage.apply(Record("a#0", TEXT))
    assert isinstance(found, Record)
    told = found.fields["rephrase"]
    assert told["source_sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    assert told["prompt_sha256"] == hashlib.sha256(PROMPTS["easy"].encode()).hexdigest()
    assert (told["model"], told["model_sha256"]) == (model, napkin.load(model).fingerprint)
    assert (told["style"], told["seed"], told["temperature"], told["max_tokens"]) == ("easy", 7, 1.0, 100)
    # Every byte and the two special tokens of each prompt.
    assert told["prompt_tokens"] == sum(len(PROMPTS["easy"]) + 2 + len(each) + 2 for each in TEXT.split("\n\n"))
    assert told["passages"] == 2
    # Each passage has its characters and the token that ends it; one may have begun with white space.
    assert len(found.text) - 2 + 2 <= told["tokens"] <= len(found.text) + 2
    assert found.trace[-1].note == f"2 of 2 passages, {told['tokens']} tokens"
    # A text is a function of document and options: not of those before it.
    Rephrase(model, temperature=1.0, seed=1, least=0).apply(Record("b#0", "Something else."))
    again = Rephrase(model, style="easy", passage_characters=60, max_tokens=100, temperature=1.0, seed=7, least=0)
    same = again.apply(Record("a#0", TEXT))
    assert isinstance(same, Record)
    assert (same.text, same.fields) == (found.text, found.fields)
    for other in (Record("a#1", TEXT), Record("a#0", TEXT + "!")):
        drawn = stage.apply(other)
        assert not isinstance(drawn, Record) or drawn.text != found.text


def test_what_a_rule_leaves_out_is_counted(model: str) -> None:
    record = Record("a#0", TEXT)
    for options, rule in (
        ({"max_tokens": 1}, "not finished"),
        ({"least": 50.0, "most": 60.0, "max_tokens": 100}, "too short"),
        ({"least": 0.0, "most": 0.0, "max_tokens": 100}, "too long"),
        ({"prompt": "x" * 600}, "longer than the context"),
    ):
        found = make_stage("rephrase", {"model": model, "temperature": 1.0, **options}).apply(record)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        assert isinstance(found, Dropped)
        assert found.rule == rule
    assert Rephrase(model).apply(Record("a#0", " \n")) == Dropped("no text")
    with pytest.raises(NapkinError, match=r"stage 'rephrase'.*max_similarity is 0"):
        make_stage("rephrase", {"model": model, "max_similarity": 0.0})
    with pytest.raises(NapkinError, match="temperature is -1"):
        make_stage("conversations", {"model": model, "temperature": -1.0})


def test_a_copy_is_told_by_the_similarity_of_its_words() -> None:
    words = [f"word{n}" for n in range(400)]
    for kept in (400, 380, 300):
        other = [*words[:kept], *(f"other{n}" for n in range(400 - kept))]
        shingles = [{tuple(each[n : n + 5]) for n in range(396)} for each in (words, other)]
        jaccard = len(shingles[0] & shingles[1]) / len(shingles[0] | shingles[1])
        # 256 hashes have a standard error of at most 0.03.
        assert _copied(" ".join(words), " ".join(other), jaccard - 0.1) == "copied"
        if kept < 400:
            assert _copied(" ".join(words), " ".join(other), min(jaccard + 0.1, 1.0)) == ""
    assert _copied("word", "", 0.5) == ""


@pytest.mark.parametrize("characters", [1, 7, 20, 60, 1000])
def test_passages_have_all_words_in_their_order_and_are_no_longer_than_they_may_be(characters: int) -> None:
    text = TEXT + "\n \n" + "x" * 150 + " end? Yes!\tNo.\n\n\n"
    passages = passages_of(text, characters)
    assert all(0 < len(each) <= characters for each in passages)
    assert "".join("".join(passages).split()) == "".join(text.split())


@pytest.mark.thorough
def test_a_conversation_has_questions_and_answers_of_the_passages(model: str, tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    for number in range(8):
        (tmp_path / "pages" / f"{number}.txt").write_text(f"{TEXT} Number {number}.")
    stage = Conversations(model, passage_characters=60, max_tokens=100, temperature=1.0)
    pipeline = Pipeline(InputOptions((f"{tmp_path}/pages",)), (stage,), OutputOptions("jsonl"))
    curate(pipeline, tmp_path / "made")
    lines = [
        json.loads(line) for path in (tmp_path / "made/documents").iterdir() for line in path.read_text().splitlines()
    ]
    assert lines
    for line in lines:
        messages = line["fields"]["messages"]
        assert [each["role"] for each in messages] == ["user", "assistant"] * (len(messages) // 2)
        for asked in messages[::2]:
            passage, _, question = asked["content"].rpartition("\n\n")
            assert passage in TEXT + f" Number {Path(line['source']).stem}."
            assert question.endswith("?")
        told = line["fields"]["conversations"]
        assert told["prompt_sha256"] == hashlib.sha256(f"{ASK}\0{ANSWER}".encode()).hexdigest()
        assert told["passages"] == len(messages) // 2
    # What tuning reads.
    (path,) = (tmp_path / "made/documents").iterdir()
    assert [[{"role": m.role, "content": m.content} for m in chat.messages] for chat in read_chats(path)] == [
        line["fields"]["messages"] for line in lines
    ]
    manifest = json.loads((tmp_path / "made/manifest.json").read_text())
    (books,) = manifest["stages"]
    dropped = sum(amount["documents"] for amount in books["dropped"].values())
    assert dropped + len(lines) == books["entered"]["documents"] == 8
    assert books["remained"]["documents"] == len(lines)


@pytest.mark.thorough
def test_a_plan_runs_the_model_on_few_documents_and_says_what_all_will_be(model: str, tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    for number in range(60):
        (tmp_path / "pages" / f"{number}.txt").write_text(f"It rained on day {number}.")
    stage = Rephrase(model, max_tokens=200, temperature=1.0, least=0, most=100.0)
    pipeline = Pipeline(InputOptions((f"{tmp_path}/pages",)), (stage,), OutputOptions("jsonl"))
    planned = plan_corpus(pipeline)
    outcome = curate(pipeline, tmp_path / "made")
    (remained,) = (each.remained for each in planned.stages)
    (books,) = outcome.manifest.stages
    assert books.remained.documents >= 55
    assert remained.documents.value == pytest.approx(books.remained.documents, rel=0.1)
    # Sixteen of sixty lengths that scatter by about as much as their mean.
    assert remained.bytes.value == pytest.approx(books.remained.bytes, rel=0.75)
    assert planned.stages[0].seconds > 0


RUN = """
import sys
from napkin.cli import main
sys.exit(main(["data", "rephrase", *sys.argv[1:]]))
"""


@pytest.mark.torture
def test_a_killed_pipeline_ends_with_the_same_bytes(model: str, tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    for number in range(40):
        (tmp_path / "pages" / f"{number:02d}.txt").write_text(f"{TEXT} " * 8 + str(number))
    arguments = [sys.executable, "-c", RUN, str(tmp_path / "pages"), "--model", model, "--temperature", "1.0"]
    arguments += ["--passage-characters", "60", "--max-tokens", "60", "--least", "0", "--workers", "1"]

    def digests(out: str) -> dict[str, str]:
        return {
            str(path.relative_to(tmp_path / out)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in (tmp_path / out).rglob("*")
            if path.is_file() and path.name != "meter.json"
        }

    subprocess.run([*arguments, "--out", str(tmp_path / "whole")], check=True, stdout=subprocess.DEVNULL)
    killed: Any = subprocess.Popen([*arguments, "--out", str(tmp_path / "killed")], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "killed").rglob("dropped.jsonl.zst")) and time.monotonic() < deadline:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -9
    subprocess.run([*arguments, "--out", str(tmp_path / "killed")], check=True, stdout=subprocess.DEVNULL)
    assert digests("killed") == digests("whole")
