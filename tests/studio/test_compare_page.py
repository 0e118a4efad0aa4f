"""The chat page: answers are the library's, hostile texts are text, commands read its votes; in a browser."""

import asyncio
import dataclasses
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from napkin.chats.chat_encoder import ChatEncoder
from napkin.chats.chat_format import Message
from napkin.errors import NapkinError
from napkin.evaluation.pairwise import read_votes
from napkin.inference.loaded_model import LoadedModel, load
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.studio import models as shelves
from napkin.studio.models import ModelShelf
from napkin.tokenizer import train_bpe
from napkin.training.run import train
from napkin.tuning.method import encoder_of_base, tune
from oracles.browser import Browser
from oracles.tiny_run import tiny_recipe, write_tiny_text
from oracles.tiny_tuning import tuning_recipe, write_conversations
from reliability.harness import Napkin
from studio.conftest import Answer, Studio, started
from studio.test_accessibility import AXE, violations

HOSTILE = "<img src=x onerror=document.title='taken'>\u202e\x00</p>"
MODEL = ModelConfig(context_length=256, d_model=32, n_layers=1, n_heads=2)
RUNS = ("first", "<b>second")
FILES = ("exported", "small.gguf")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, the second of a name that is markup; one that is tuned, a folder that cannot be opened."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_text(folder)
    for number, name in enumerate(RUNS):
        model = dataclasses.replace(MODEL, d_model=32 + 16 * number)
        recipe = dataclasses.replace(tiny_recipe(folder, steps=1 + number), model=model)
        train(recipe, folder / name)
    (folder / "start").symlink_to(folder / "first")
    for number, name in enumerate(("train.jsonl", "held_out.jsonl")):
        write_conversations(folder / name, 8, number)
    tune(tuning_recipe(folder, steps=1), folder / "tuned")
    tokenizer = train_bpe(["the next text has some words, and more of the words of a text"], vocab_size=300)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = Transformer(dataclasses.replace(MODEL, vocab_size=tokenizer.vocab_size))
    for name in FILES:
        LoadedModel.of(made, tokenizer).export(folder / name)
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def chat(models: Path, tmp_path_factory: pytest.TempPathFactory, server: subprocess.Popen[str]) -> Iterator[Studio]:
    with started(Napkin(tmp_path_factory.mktemp("place"), server), str(models), "--allow-actions") as studio:
        yield studio


def asked(studio: Studio, names: list[str], **fields: Any) -> tuple[str, list[Answer]]:
    """A round, and its answers."""
    kind = "text" if "prompt" in fields else "chat"
    found = studio.ask("/api/chat/ask", {"models": names, kind: {"max_tokens": 8, **fields}})
    assert found.status == 200, found.content
    number = found.json["round"]
    return number, [
        studio.ask("/api/chat/answer", {"round": number, "side": side}) for side in range(found.json["sides"])
    ]


def text_of(answer: Answer) -> str:
    """What a stream of events adds up to."""
    objects = [json.loads(line[6:]) for line in answer.content.decode().split("\n\n") if line.startswith("data: {")]
    choices = [choice for each in objects for choice in each["choices"]]
    return "".join(each["delta"].get("content", "") if "delta" in each else each["text"] for each in choices)


def said(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_models_are_found_and_what_cannot_be_opened_says_why(chat: Studio) -> None:
    found = chat.ask("/api/chat/models").json["models"]
    assert found == [
        {"name": "<b>second", "kind": "run"},
        {"name": "broken", "kind": "Hugging Face folder"},
        {"name": "exported", "kind": "Hugging Face folder"},
        {"name": "first", "kind": "run"},
        {"name": "small.gguf", "kind": "GGUF file"},
        {"name": "tuned", "kind": "run"},
    ]
    told = chat.ask("/api/chat/open", {"name": "tuned"}).json
    assert told["has_chat_template"]
    assert (told["step"], told["context_length"]) == (1, 256)
    broken = chat.ask("/api/chat/open", {"name": "broken"})
    assert broken.status == 422
    assert "broken" in broken.json["error"]


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("open", {"name": "../first"}, 422, "there is no model '../first'"),
        ("ask", {"models": ["first"]}, 400, "a chat or with a text"),
        ("ask", {"models": ["first", "first"], "text": {"prompt": "a"}}, 400, "two that differ"),
        ("ask", {"models": ["first"], "text": {"prompt": "a", "temprature": 1}}, 400, "did you mean temperature"),
        ("ask", {"models": ["first"], "text": {"prompt": ["a", "b"]}}, 400, "one prompt"),
        ("ask", {"models": ["first"], "chat": {"messages": []}}, 400, "messages is empty"),
        ("answer", {"round": "x", "side": 0}, 404, "ask again"),
        ("vote", {"round": "x", "verdict": "a"}, 404, "ask again"),
        ("vote", {"round": "x", "verdict": "first"}, 400, "first"),
        ("learned", {"model": "first", "messages": [{"role": "<b>"}]}, 400, "content"),
    ],
)
def test_what_is_wrong_is_named(chat: Studio, path: str, body: object, status: int, reason: str) -> None:
    told = chat.ask(f"/api/chat/{path}", body)
    assert told.status == status
    assert reason in told.json["error"]


def test_answers_are_those_of_the_library(chat: Studio, models: Path) -> None:
    settings = {"temperature": 1.0, "top_p": 0.9, "seed": 11}
    _, (answer,) = asked(chat, ["first"], prompt="the n", **settings)
    first = load(models / "first", weights="auto")
    assert text_of(answer) == first.generate("the n", max_new_tokens=8, **settings)
    for name in FILES:
        _, (answer,) = asked(chat, [name], prompt="the n", **settings)
        assert text_of(answer) == load(models / name, weights="auto").generate("the n", max_new_tokens=8, **settings)
    _, (answer,) = asked(chat, ["tuned"], messages=said("abc"), **settings)
    assert text_of(answer) == load(models / "tuned", weights="auto").chat(said("abc"), max_new_tokens=8, **settings)
    _, (answer,) = asked(chat, ["first"], prompt="the n", max_tokens=400)
    assert b"model's context" in answer.content


def test_models_are_closed_for_others_unless_they_are_used(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelves, "MOST_OPEN", 2)

    async def steps() -> None:
        shelf = ModelShelf(models)
        async with shelf.using("first") as first:
            for name in ("<b>second", "tuned"):
                async with shelf.using(name) as model:
                    assert model.opened.name == name
            # The second was used before the third, and the first still is.
            assert model.messages == ["'<b>second' was closed to make room: it was used longest ago"]
            async with shelf.using("tuned"):
                with pytest.raises(NapkinError, match="wait until one has ended, then open '<b>second'"):
                    async with shelf.using("<b>second"):
                        pass
            async with shelf.using("first") as again:
                assert again is first
        monkeypatch.setattr(shelves, "_FREE", 0.0)
        with pytest.raises(NapkinError, match=r"'small\.gguf' needs .* for weights and cache"):
            async with shelf.using("small.gguf"):
                pass
        # What was refused has closed nothing.
        async with shelf.using("first") as again:
            assert again is first
        await shelf.close()

    asyncio.run(steps())


def test_a_prompt_that_no_context_holds_is_one_clients_own_mistake(chat: Studio) -> None:
    number = chat.ask("/api/chat/ask", {"models": ["first"], "text": {"prompt": HOSTILE * 30_000}}).json["round"]
    told = chat.ask("/api/chat/answer", {"round": number, "side": 0})
    assert told.status == 400
    assert "shorten it" in told.json["error"]
    assert asked(chat, ["first"], prompt="a")[1][0].status == 200


def test_what_is_learned_is_what_tuning_would_learn(chat: Studio, models: Path) -> None:
    conversation = [*said(HOSTILE), {"role": "assistant", "content": "yes <|endoftext|> \u202e"}, *said("and?")]
    body = {"model": "tuned", "messages": conversation}
    told = chat.ask("/api/chat/learned", body).json
    encoder: ChatEncoder = encoder_of_base(load(models / "tuned"))
    expected = encoder.sequence([Message(each["role"], each["content"]) for each in conversation])
    assert (told["tokens"], told["learned"]) == (len(expected.tokens), expected.n_trained)
    learned = [text for text, is_learned, _ in told["parts"] if is_learned]
    assert learned == [" yes \\<|endoftext|> \\u202e", "<|endoftext|>"]
    asking = chat.ask("/api/chat/learned", {**body, "messages": said("hm")}).json
    assert asking["learned"] == 0
    assert "".join(text for text, _, _ in asking["parts"]).endswith("assistant:")


def test_votes_are_blind_rate_models_and_are_trained_on(
    chat: Studio, models: Path, tmp_path: Path, server: subprocess.Popen[str]
) -> None:
    napkin = Napkin(tmp_path, server)
    votes = models / "votes.jsonl"
    votes.unlink(missing_ok=True)
    orders, kept = set(), 0
    verdicts = ["a", "b", "tie", "both bad", *"abababababab"]
    for number, verdict in enumerate(verdicts):
        round_, answers = asked(chat, list(RUNS), messages=said(f"{HOSTILE} {number}"), seed=number, temperature=0)
        assert not any(json.dumps(name).encode() in answer.content for answer in answers for name in RUNS)
        told = chat.ask("/api/chat/vote", {"round": round_, "verdict": verdict})
        assert told.status == 200, told.content
        orders.add(tuple(told.json["names"]))
        line = json.loads(votes.read_text().splitlines()[-1])
        assert [line["a"], line["b"]] == told.json["names"]
        assert line["settings"]["seed"] == number
        texts = [text_of(each) for each in answers]
        if verdict in ("a", "b"):
            chosen = "ab".index(verdict)
            assert (line["chosen"], line["rejected"]) == (texts[chosen], texts[1 - chosen])
            assert line["prompt"] == said(f"{HOSTILE} {number}")
            kept += texts[0].strip() != texts[1].strip() and all(text.strip() for text in texts)
        else:
            assert line["answers"] == texts
            assert line["winner"] == "tie"
        again = chat.ask("/api/chat/vote", {"round": round_, "verdict": "a"})
        assert again.status == 409
    # Sixteen rounds in one order are less likely than one in 30,000.
    assert len(orders) == 2
    assert [vote.winner for vote in read_votes(votes)][:4] == ["a", "b", "tie", "tie"]

    ranking = chat.ask("/api/chat/votes").json
    told = json.loads(napkin.run("evaluate", "votes", str(votes), "--json").out.read_text())
    if ranking["models"]:
        assert ranking["models"] == told["ratings"]["models"]
    else:
        assert ranking["because"] == told["no_ratings_because"]
    assert kept > 8
    start, out = str(models / "tuned"), str(tmp_path / "preferred")
    files = ["--data.train", str(votes), "--data.validation", str(votes)]
    done = napkin.run("tune", "preference", "--tuning.start", start, *files, "--training.steps", "2", "--run", out)
    assert done.wait() == 0, done.err.read_text()
    assert "as votes that prefer no answer to a conversation" in done.out.read_text() + done.err.read_text()
    assert (tmp_path / "preferred" / "checkpoints" / "step-00000002").is_dir()


def test_a_vote_is_for_the_weights_that_answered_and_a_damaged_file_is_named(chat: Studio, models: Path) -> None:
    votes = models / "votes.jsonl"
    votes.unlink(missing_ok=True)
    round_, _ = asked(chat, list(RUNS), prompt="a")
    newer = models / "<b>second" / "checkpoints" / "step-00000009"
    newer.mkdir()
    told = chat.ask("/api/chat/vote", {"round": round_, "verdict": "a"})
    assert told.status == 422
    assert "newer weights" in told.json["error"]
    assert not votes.exists()
    newer.rmdir()
    votes.write_text("no JSON")
    assert "line 1 is not a vote" in chat.ask("/api/chat/votes").json["because"]
    # A line that was cut off spoils no other.
    assert chat.ask("/api/chat/vote", {"round": round_, "verdict": "tie"}).status == 200
    first, second = votes.read_text().splitlines()
    assert first == "no JSON"
    assert json.loads(second)["asked"] == "a"
    votes.unlink()


def test_names_end_a_round_and_a_studio_without_actions_writes_nothing(
    chat: Studio, models: Path, tmp_path: Path, server: subprocess.Popen[str]
) -> None:
    round_, _ = asked(chat, list(RUNS), prompt="a")
    assert sorted(chat.ask("/api/chat/names", {"round": round_}).json["names"]) == sorted(RUNS)
    told = chat.ask("/api/chat/vote", {"round": round_, "verdict": "a"})
    assert told.status == 409
    begun = chat.ask("/api/chat/ask", {"models": list(RUNS), "text": {"prompt": "a"}}).json["round"]
    assert "not finished" in chat.ask("/api/chat/vote", {"round": begun, "verdict": "a"}).json["error"]
    folder = tmp_path / "shown"
    folder.mkdir()
    for name in RUNS:
        shutil.copytree(models / name, folder / name)
    with started(Napkin(tmp_path, server), str(folder)) as shown:
        round_, _ = asked(shown, list(RUNS), prompt="a")
        told = shown.ask("/api/chat/vote", {"round": round_, "verdict": "a"})
        assert told.status == 403
        assert "--allow-actions" in told.json["error"]
        assert not (folder / "votes.jsonl").exists()


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser to look with")
@pytest.mark.parametrize("dark", [False, True])
def test_two_models_are_compared_by_keyboard_in_a_browser(chat: Studio, tmp_path: Path, dark: bool) -> None:
    value = "document.querySelector('#{}').value = {}".format
    with Browser(tmp_path / "profile", dark=dark) as browser:
        browser.open(chat.address)
        browser.open(f"http://127.0.0.1:{chat.port}/chat")
        browser.wait_for("'ready' in document.body.dataset")

        def choose(name: str, chosen: str) -> None:
            browser.run(value(name, json.dumps(chosen)))
            browser.run(f"document.querySelector('#{name}').dispatchEvent(new Event('change'))")

        choose("first", "first")
        choose("second", "<b>second")
        browser.wait_for("document.querySelector('#about').innerText.split('no chat template').length === 3")
        browser.run(value("max_tokens", 12))
        browser.run("document.querySelector('#text').focus()")
        browser.type(HOSTILE + "x" * 3)
        browser.press("Enter")
        browser.wait_for("document.querySelectorAll('[data-verdict]').length === 4")
        titles = "[...document.querySelectorAll('.answer h2')].map((each) => each.textContent)"
        assert browser.run(titles) == ["Answer A", "Answer B"]
        assert browser.run("document.querySelectorAll('img').length") == 0
        # Tab leads to the answers, arrows from token to token, and what else was likely is shown.
        browser.run("document.querySelector('.answer .token').focus()")
        browser.press("ArrowRight")
        assert not browser.run("document.querySelector('#alternatives').hidden")
        assert browser.run("document.querySelectorAll('#alternatives meter').length") >= 5
        browser.press("Escape")
        assert browser.run("document.querySelector('#alternatives').hidden")
        before = browser.run("document.querySelector('#votes').textContent")
        browser.run("document.querySelector('[data-verdict=b]').focus()")
        browser.press("Enter")
        browser.wait_for("document.querySelector('.verdict-row')?.innerText.includes('your vote: b')")
        browser.wait_for(f"document.querySelector('#votes').textContent !== {json.dumps(before)}")
        assert sorted(each[3:] for each in browser.run(titles)) == sorted(RUNS)
        assert browser.run("document.querySelector('.goes-on h2').textContent")[0] == "B"
        # What would be learned is the answer that was preferred.
        browser.run("document.querySelector('#learned > summary').click()")
        browser.wait_for("document.querySelectorAll('#written .learned').length > 0")
        assert browser.run("document.querySelectorAll('b, #messages img').length") == 0
        for width in (390, 2560):
            browser.size(width, 900)
            if AXE.exists():
                assert violations(browser) == []
            assert browser.run("document.documentElement.scrollWidth") <= width
        browser.size(1280, 900)

        # An answer is stopped from the keyboard. The end of a text has the last id, and none of this seed's first 60
        # numbers is near 1: without a seed, one of a hundred answers ends at once.
        choose("second", "")
        browser.run(value("seed", 0))
        browser.run(value("max_tokens", 200))
        browser.run("document.querySelector('#text').focus()")
        browser.type("go")
        browser.press("Enter")
        browser.wait_for("document.querySelectorAll('.answer .token').length > 2")
        browser.press("Escape")
        browser.wait_for("!document.querySelector('#send').hidden")
        outside = (
            "performance.getEntriesByType('resource').filter((each) => !each.name.startsWith(location.origin)).length"
        )
        assert browser.run(outside) == 0
        assert browser.run("document.title") == "Chat · napkin"
        assert browser.complaints == []
