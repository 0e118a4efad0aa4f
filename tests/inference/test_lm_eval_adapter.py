"""The adapter's methods, as lm-evaluation-harness calls them; with the harness itself where it is installed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from napkin.errors import NapkinError
from napkin.inference.lm_eval_adapter import HarnessMethods, harness_class
from oracles.served_model import tiny_served_model
from peers import peer

MODEL = tiny_served_model()


@torch.no_grad()
def greedy(prompt: list[int], n: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(MODEL.model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def logprob(context: list[int], continuation: list[int]) -> float:
    logits = MODEL.model(torch.tensor([[*context, *continuation[:-1]]]))[0, len(context) - 1 :].double()
    return float(logits.log_softmax(-1)[range(len(continuation)), continuation].sum())


def test_generated_answers_are_greedy_and_end_before_the_stop_text() -> None:
    methods = HarnessMethods(MODEL)
    prompt = [*MODEL.start_ids, *b"Once upon"]
    text = MODEL.tokenizer.decode(greedy(prompt, 20)).partition("<|endoftext|>")[0]
    requests = [
        SimpleNamespace(args=("Once upon", {"until": [text[6:8]], "max_gen_toks": 20})),
        SimpleNamespace(args=("Once upon", {"until": "\n\n\n", "max_gen_toks": 5, "do_sample": False})),
    ]
    assert methods.generate_until(requests) == [
        text.partition(text[6:8])[0],
        MODEL.tokenizer.decode(greedy(prompt, 5)),
    ]
    sampled = SimpleNamespace(args=("x", {"do_sample": True, "temperature": 0.7}))
    with pytest.raises(NapkinError, match="draws at a temperature"):
        methods.generate_until([sampled])
    with pytest.raises(NapkinError, match="leaves no room"):
        methods.generate_until([SimpleNamespace(args=("x", {"max_gen_toks": 5000}))])


def test_log_likelihoods_are_those_of_each_pair_in_the_order_of_the_requests() -> None:
    pairs = [([256, *b"b and"], list(b" more")), ([256, *b"a"], list(b"b")), ([256, *b"b and"], list(b" less"))]
    found = HarnessMethods(MODEL)._loglikelihood_tokens([("", *pair) for pair in pairs])
    assert [total for total, _ in found] == pytest.approx([logprob(*pair) for pair in pairs], abs=1e-4)
    assert [is_greedy for _, is_greedy in found] == [greedy(*_first(pair)) == pair[1] for pair in pairs]


def _first(pair: tuple[list[int], list[int]]) -> tuple[list[int], int]:
    return pair[0], len(pair[1])


@pytest.mark.peers
def test_the_harness_itself_calls_the_adapter() -> None:
    peer("lm_eval")
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]

    model: Any = harness_class()(MODEL)

    def asked(kind: str, *arguments: Any) -> Any:
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    (found,) = model.loglikelihood([asked("loglikelihood", "The sky ", "is blue")])
    assert found[0] == pytest.approx(logprob([256, *b"The sky"], list(b" is blue")), abs=1e-4)
    (empty,) = model.loglikelihood([asked("loglikelihood", "", "blue")])
    assert empty[0] == pytest.approx(logprob([256], list(b"blue")), abs=1e-4)
    (rolling,) = model.loglikelihood_rolling([asked("loglikelihood_rolling", "a text")])
    assert rolling == pytest.approx(logprob([256], list(b"a text")), abs=1e-4)


def test_without_the_harness_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    harness_class.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "lm_eval.api.model", None)
    with pytest.raises(NapkinError, match="pip install lm_eval"):
        harness_class()
