import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Napkin
from napkin.cli.models import generate
from napkin.inference.engine import Engine
from napkin.inference.loaded_model import LoadedModel, load
from napkin.inference.requests import Request
from napkin.inference.settings import Sampling


def completion(napkin: Napkin, *options: str) -> dict:
    done = napkin("generate", "runs/tiny", "--tokens", "30", "--temperature", "1.5", "--json", *options)
    assert done.status == 0, done.err
    return json.loads(done.out)[0]


@pytest.mark.thorough
def test_a_completion_ends_before_a_stop_text_and_shows_the_same_as_json(napkin: Napkin, place: Path) -> None:
    whole = completion(napkin)["completion"]
    stop = whole[8:10]
    assert completion(napkin, "--stop", stop, "never")["completion"] == whole[: whole.index(stop)]
    shown = napkin("generate", "runs/tiny", "--tokens", "30", "--temperature", "1.5", "--stop", stop).out
    assert shown == f"=== 1 (seed 0)\n{whole[: whole.index(stop)]}\n\n"


def test_pieces_of_a_stream_are_the_generated_text(place: Path) -> None:
    trained = load("runs/tiny")
    pieces = list(trained.stream("the", max_new_tokens=20, seed=3))
    assert len(pieces) > 1
    assert "".join(pieces) == trained.generate("the", max_new_tokens=20, seed=3)


def test_what_the_first_token_waits_for_is_told_before_the_prompt_and_then_pieces_as_they_are_made(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    stream = LoadedModel.stream

    def told(self: LoadedModel, *prompt: str, **how: Any) -> Iterator[str]:
        shown.append("compiling")
        for piece in stream(self, *prompt, **how):
            yield piece
            shown.append("next")

    monkeypatch.setattr(LoadedModel, "stream", told)
    monkeypatch.setattr(generate, "print_verbatim", lambda text, end="\n": shown.append(text))
    generate.generate_command(["runs/tiny", "the", "--tokens", "3"])
    assert shown[:2] == ["compiling", "=== 1 (seed 0)\nthe"]
    # No piece waits for those after it.
    assert shown[3] == "next"


@pytest.mark.thorough
def test_log_probabilities_are_told_in_json(napkin: Napkin, place: Path) -> None:
    assert "tokens" not in completion(napkin)
    drawn = completion(napkin, "--logprobs", "3")["tokens"]
    assert len(drawn) <= 30
    for each in drawn:
        top = dict(each["top"])
        assert len(top) == 3
        assert each["logprob"] == top.get(each["token"], each["logprob"]) <= 0
        assert sum(math.exp(logprob) for logprob in top.values()) <= 1.0001


def test_biased_tokens_alone_are_drawn(napkin: Napkin, place: Path) -> None:
    trained = load("runs/tiny")
    token = trained.tokenizer.encode("e")[0]
    assert completion(napkin, "--logit-bias", str(token), "100")["completion"] == "e" * 30
    assert napkin("generate", "runs/tiny", "--logit-bias", "999999", "1").status == 2
    for wrong in ("--min-p nan", "--repetition-penalty inf", "--logit-bias 1 nan", "--logprobs -1", "--stop ''"):
        done = napkin("generate", "runs/tiny", *[each.strip("'") for each in wrong.split()])
        assert done.status == 2
        assert len(done.err.splitlines()) == 1


@pytest.mark.thorough
def test_proposed_tokens_change_no_greedy_text_and_their_gain_is_told(napkin: Napkin, place: Path) -> None:
    greedy = ("--prompts", "the", "then", "--temperature", "0", "--tokens", "30")
    plain = napkin("generate", "runs/tiny", *greedy)
    for options in (["--lookup", "2"], ["--draft", "runs/tiny"], ["--draft", "runs/tiny", "--proposed", "3"]):
        done = napkin("generate", "runs/tiny", *greedy, *options)
        assert done.out == plain.out
        assert "tokens per pass of the model" in done.err
    for wrong in (["--lookup", "-1"], ["--lookup", "2", "--draft", "runs/tiny"], ["--proposed", "2"], ["--draft", "."]):
        done = napkin("generate", "runs/tiny", *wrong)
        assert done.status == 2
        assert len(done.err.splitlines()) == 1


def test_keys_and_values_in_int8_give_a_text_of_the_engine(napkin: Napkin, place: Path) -> None:
    trained = load("runs/tiny")
    engine = Engine(trained.model, kv="int8", max_running=1)
    separator = trained.tokenizer.special_tokens["<|endoftext|>"]
    start = [separator, *trained.tokenizer.encode("the")]
    asked = engine.submit(Request(start, 8, Sampling(temperature=1.5, seed=4, stop_ids=(separator,))))
    engine.run()
    options = ("--prompts", "the", "--tokens", "8", "--seed", "4", "--kv", "int8")
    assert completion(napkin, *options)["completion"] == trained.tokenizer.decode(asked.tokens)
    for wrong, line in (
        (["--tokens", "30"], "exceed the model's context of 16"),
        (["--tokens", "8", "--lookup", "2"], "keys and values in int8 do not go with a draft model or a lookup"),
    ):
        done = napkin("generate", "runs/tiny", "--kv", "int8", *wrong)
        assert done.status == 2
        assert line in done.err
        assert len(done.err.splitlines()) == 1


def test_prompts_stand_behind_the_run_or_its_option(napkin: Napkin, place: Path) -> None:
    def prompts(*arguments: str) -> list[str]:
        done = napkin("generate", "runs/tiny", *arguments, "--tokens", "3", "--json")
        assert done.status == 0, done.err
        return [each["prompt"] for each in json.loads(done.out)]

    assert prompts("def main(") == prompts("--prompts", "def main(") == ["def main("]
    assert prompts("a b", "c", "--seed", "1", "--prompts", "d", "--stop", "zz") == ["a b", "c", "d"]
    assert prompts() == prompts("") == prompts("--prompts", "") == [""]
    assert napkin("generate", "runs/tiny", "--prompts").status == 2
