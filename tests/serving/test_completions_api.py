"""What a server answers is what the model says: against the library's own generation and forward passes."""

import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from napkin.inference.generation import generate
from napkin.inference.loaded_model import LoadedModel
from napkin.inference.settings import Sampling
from oracles.served_model import SEPARATOR, tiny_served_model
from serving.conftest import Served


@pytest.fixture(scope="module")
def opened() -> LoadedModel:
    return tiny_served_model()


def generated(opened: LoadedModel, ids: list[int], n_tokens: int, **how: Any) -> str:
    return opened.tokenizer.decode(
        list(generate(opened.model, ids, n_tokens, Sampling(**how), stop=opened.stop_ids[0]))
    )


def logprobs_of(opened: LoadedModel, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of every token after each of `ids`."""
    with torch.no_grad():
        return opened.model(torch.tensor([ids]))[0].float().log_softmax(-1)


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.8, "seed": 5},
        {"temperature": 1.3, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.2, "seed": 6},
    ],
)
def test_the_text_is_that_of_the_library(served: Served, opened: LoadedModel, how: dict[str, Any]) -> None:
    library = {"top_p": 1.0, **how}
    expected = generated(opened, opened.encode_prompt("Once upon"), 30, **library)
    (choice,) = served.complete("Once upon", max_tokens=30, **how)
    assert choice["text"] == expected
    assert choice["logprobs"] is None
    # Token ids are taken as they are.
    (choice,) = served.complete([79, 110], max_tokens=30, **how)
    assert choice["text"] == generated(opened, [79, 110], 30, **library)


def test_several_prompts_and_choices_are_in_order_each_with_the_next_seed(served: Served, opened: LoadedModel) -> None:
    choices = served.complete(["ab", "cd"], n=2, max_tokens=8, seed=3)
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"] for choice in choices] == [
        generated(opened, opened.encode_prompt(text), 8, temperature=1.0, top_p=1.0, seed=seed)
        for text in ("ab", "cd")
        for seed in (3, 4)
    ]
    by_ids = served.complete([opened.encode_prompt("ab"), opened.encode_prompt("cd")], n=2, max_tokens=8, seed=3)
    assert [choice["text"] for choice in by_ids] == [choice["text"] for choice in choices]


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_echoed_tokens_have_the_log_probabilities_of_a_forward_pass(
    served: Served, opened: LoadedModel, max_tokens: int
) -> None:
    prompt = list(b"the cat sat")
    answer = served.post(
        "/v1/completions", prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=3, temperature=0, ignore_eos=True
    ).json
    choice = answer["choices"][0]
    told = choice["logprobs"]
    assert choice["text"].startswith("the cat sat")
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert {len(each) for each in told.values()} == {len(prompt) + max_tokens}
    assert told["tokens"][: len(prompt)] == [chr(byte) for byte in prompt]
    assert told["text_offset"][: len(prompt)] == list(range(len(prompt)))
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    ids = [*prompt, *opened.tokenizer.encode(generated(opened, prompt, max_tokens, temperature=0))][: len(prompt)]
    expected = logprobs_of(opened, ids)
    for place in range(1, len(prompt)):
        assert told["token_logprobs"][place] == pytest.approx(expected[place - 1, ids[place]].item(), abs=1e-4)
        best = expected[place - 1].topk(3).values.tolist()
        assert sorted(told["top_logprobs"][place].values(), reverse=True)[:3] == pytest.approx(best, abs=1e-4)
        assert told["tokens"][place] in told["top_logprobs"][place]


def test_an_echoed_text_is_scored_after_what_stands_before_every_text(served: Served, opened: LoadedModel) -> None:
    (choice,) = served.complete("café", max_tokens=0, echo=True, logprobs=0)
    ids = opened.encode_prompt("café")
    expected = logprobs_of(opened, ids)
    assert choice["text"] == "café"
    assert choice["logprobs"]["tokens"] == ["c", "a", "f", "bytes:\\xc3", "bytes:\\xa9"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 3]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(
        [expected[place - 1, ids[place]].item() for place in range(1, len(ids))], abs=1e-4
    )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_pieces_of_a_stream_make_the_whole(served: Served, path: str) -> None:
    is_chat = "chat" in path
    asked: dict[str, Any] = {"seed": 4, "n": 2, "max_tokens": 40, "temperature": 1.5, "ignore_eos": True}
    if is_chat:
        asked |= {"messages": [{"role": "user", "content": "Hello"}], "logprobs": True, "top_logprobs": 2}
    else:
        asked |= {"prompt": "Hello", "logprobs": 2, "echo": True}
    whole = served.post(path, **asked).json
    streamed = served.post(path, **asked, stream=True, stream_options={"include_usage": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *events, last = streamed.events
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert {event["id"] for event in events} == {last["id"]}
    for index, choice in enumerate(whole["choices"]):
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        # The last piece says why it ends, the others nothing.
        assert [each["finish_reason"] for each in own] == [None] * (len(own) - 1) + ["length"]
        if is_chat:
            assert own[0]["delta"]["role"] == "assistant"
            assert "".join(each["delta"].get("content", "") for each in own) == choice["message"]["content"]
            tokens = [token for each in own for token in each["logprobs"]["content"]]
            assert [(token["token"], token["bytes"]) for token in tokens] == [
                (token["token"], token["bytes"]) for token in choice["logprobs"]["content"]
            ]
            assert len(tokens) == 40
            assert all(len(token["top_logprobs"]) == 2 for token in tokens)
        else:
            assert "".join(each["text"] for each in own) == choice["text"]
            for name in ("tokens", "text_offset"):
                assert [value for each in own for value in each["logprobs"][name]] == choice["logprobs"][name]


def test_text_ends_before_a_stop_text_of_which_nothing_is_shown(served: Served, opened: LoadedModel) -> None:
    whole = generated(opened, list(b"abc"), 60, temperature=0)
    stop = whole[20:24]
    asked: dict[str, Any] = {"prompt": list(b"abc"), "max_tokens": 60, "temperature": 0, "stop": ["\0never", stop]}
    (choice,) = served.complete(**asked, logprobs=0)
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert all(offset < len(choice["text"]) for offset in choice["logprobs"]["text_offset"])
    events = served.post("/v1/completions", **asked, stream=True).events
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
    served.wait_until_idle()


def test_a_model_that_ends_its_text_is_not_asked_on(served: Served) -> None:
    end = tiny_served_model().stop_ids[0]
    (choice,) = served.complete("abc", max_tokens=9, logit_bias={str(end): 100})
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    (choice,) = served.complete("abc", max_tokens=3, logit_bias={str(end): 100}, ignore_eos=True)
    assert (choice["text"], choice["finish_reason"]) == (3 * SEPARATOR, "length")
    (choice,) = served.complete("abc", max_tokens=3, logit_bias={"65": 100}, stop_token_ids=[65])
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_a_bias_decides_and_log_probabilities_are_those_before_it(served: Served, opened: LoadedModel) -> None:
    (choice,) = served.complete([65], max_tokens=3, logit_bias={"120": 100}, logprobs=1, temperature=0)
    assert choice["text"] == "xxx"
    expected = logprobs_of(opened, [65, 120, 120])[:, 120].tolist()
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert all(math.isfinite(value) for value in choice["logprobs"]["token_logprobs"])


def test_a_conversation_is_the_completion_of_its_lines(served: Served) -> None:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    answer = served.post("/v1/chat/completions", messages=messages, **asked).json
    (choice,) = served.complete("system: Be brief.\nuser: Hello\nassistant:", stop=["\nuser:", "\nsystem:"], **asked)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": choice["text"], "refusal": None}
    assert answer["object"] == "chat.completion"


def test_models_health_and_metrics(served: Served, opened: LoadedModel) -> None:
    (model,) = served.get("/v1/models").json["data"]
    assert (model["id"], model["object"], model["context_length"]) == ("tiny", "model", 2048)
    assert served.get("/v1/models/tiny").json == model
    assert "there is no model 'other'" in served.get("/v1/models/other").error
    assert served.get("/health").json == {"status": "ok"}
    before = served.metric("napkin_generated_tokens_total")
    served.complete("abc", max_tokens=7, ignore_eos=True)
    assert served.metric("napkin_generated_tokens_total") == before + 7
    lines = served.get("/metrics").content.decode().splitlines()
    assert all(line.startswith("# ") or len(line.split()) == 2 for line in lines)
    buckets = [float(line.split()[1]) for line in lines if line.startswith("napkin_time_to_first_token_seconds_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == served.metric("napkin_time_to_first_token_seconds_count") > 0


def test_proposals_change_no_text_and_are_counted_by_request_and_in_all(
    start_server: Callable[..., Served], opened: LoadedModel
) -> None:
    server = start_server(lookup=3)
    prompts, totals = [list(b"abcabc" * 4), list(b"the cat, the cat, the")], [0, 0]
    for prompt in prompts:
        answer = server.post("/v1/completions", prompt=prompt, max_tokens=40, temperature=0).json
        assert answer["choices"][0]["text"] == generated(opened, prompt, 40, temperature=0.0)
        told = answer["usage"]["completion_tokens_details"]
        accepted, rejected = told["accepted_prediction_tokens"], told["rejected_prediction_tokens"]
        assert 0 < accepted <= answer["usage"]["completion_tokens"]
        totals = [totals[0] + accepted, totals[1] + accepted + rejected]
    assert server.metric("napkin_accepted_tokens_total") == totals[0]
    assert server.metric("napkin_proposed_tokens_total") == totals[1]
    assert totals[0] <= server.metric("napkin_tested_tokens_total") <= totals[1]


def test_a_server_that_was_stopped_and_started_again_finds_its_prefixes(
    start_server: Callable[..., Served], tmp_path: Path
) -> None:
    prompt, texts, cached = list(b"the cat sat on the mat and said"), [], []
    for _ in range(2):
        server = start_server(prefixes=str(tmp_path / "kept"))
        answer = server.post("/v1/completions", prompt=prompt, max_tokens=8, temperature=0).json
        texts.append(answer["choices"][0]["text"])
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert server.metric("napkin_cached_tokens_total") == cached[-1]
        server.command.send(signal.SIGTERM)
        server.command.wait()
    assert texts[0] == texts[1]
    # The prompt has one full block of 16 tokens and more.
    assert cached == [0, 16]
