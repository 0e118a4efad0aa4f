"""Steps that are recorded for buckets of shapes and replayed give the answers of steps that are computed.

A CUDA graph is pretended by a function that is run again, into the tensors of its first run: what is tested is that all
that a step reads and writes is where it was, not torch's recording.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from napkin.inference.decoding_graphs import DecodingGraphs, Outputs
from napkin.inference.engine import Engine
from napkin.inference.requests import Completion, Request
from napkin.inference.settings import Sampling
from napkin.model.config import ModelConfig
from napkin.model.kv_cache import power_of_two
from napkin.model.transformer import Transformer
from oracles.host_waits import host_waits

CONFIG = ModelConfig(61, context_length=640, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2)


class Recorder:
    """Runs what was recorded again."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
        self.recorded += 1
        outputs = tuple(each.clone() for each in run())
        for each in outputs:
            # A graph computes nothing while it is recorded.
            each.zero_()

        def replay() -> None:
            self.replayed += 1
            for held, new in zip(outputs, run(), strict=True):
                held.copy_(new)

        return outputs, replay


@functools.cache
def model_of(**changes: Any) -> Transformer:
    model = Transformer(dataclasses.replace(CONFIG, **changes), seed=1)
    with torch.no_grad():
        # Random weights give nearly equal logits, whose order rounding would decide.
        model.head_weight.mul_(20)
    return model.eval()


def engine_of(model: Transformer, record: Any = None, **settings: Any) -> Engine:
    engine = Engine(model, max_running=5, prefill_chunk=32, block_size=8, **settings)
    engine.graphs = DecodingGraphs(model, engine.cache, record)
    return engine


def answered(engine: Engine) -> list[Completion]:
    draw = torch.Generator().manual_seed(0)
    lengths = [(3, 9), (17, 30), (30, 2), (41, 12), (500, 20), (8, 25)]
    made = []
    for seed, (length, new) in enumerate(lengths):
        prompt = torch.randint(61, (length,), generator=draw).tolist()
        sampling = Sampling(temperature=0.8 * (seed % 2), top_k=20 if seed == 3 else None, seed=seed)
        made.append(engine.submit(Request(prompt, new, sampling, sampled_logprobs=True)))
    engine.run()
    return made


@pytest.mark.parametrize(
    ("changes", "kv"),
    [
        ({}, "auto"),
        ({"attention_window": 9}, "auto"),
        ({"positions": "alibi"}, "int8"),
        ({"n_experts": 4, "positions": "learned"}, "auto"),
    ],
    ids=str,
)
def test_replayed_steps_give_the_answers_of_computed_ones(changes: dict[str, Any], kv: Any) -> None:
    model, recorder = model_of(**changes), Recorder()
    expected = [each.tokens for each in answered(engine_of(model, kv=kv))]
    engine = engine_of(model, recorder, kv=kv)
    assert [each.tokens for each in answered(engine)] == expected
    assert engine.graphs.obstacle is None
    # Batches of 1, 2, 4 and 8 rows, and keys up to 512 and 640.
    assert recorder.recorded <= 8 < 20 < recorder.replayed


def test_what_a_step_reads_and_writes_stays_where_it_is() -> None:
    engine, seen = engine_of(model_of()), []

    def record(run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], object]]:
        outputs, replay = Recorder()(run)

        def watched() -> None:
            replay()
            for recorded in engine.graphs._recorded.values():
                given = recorded.inputs
                tensors = given.tokens, given.ends, given.table, recorded.logits, recorded.finite
                seen.append(tuple(each.data_ptr() for each in tensors))

        return outputs, watched

    engine.graphs = DecodingGraphs(engine.model, engine.cache, record)
    answered(engine)
    assert 1 < len(set(seen)) == len(engine.graphs._recorded) < len(seen) / 5


@torch.inference_mode()
def test_rows_of_padding_change_nothing() -> None:
    model, drawn = model_of(), torch.Generator().manual_seed(0)
    tokens = torch.randint(61, (3, 20), generator=drawn)
    logits = []
    for noise in (0.0, 1e4):
        engine = engine_of(model, Recorder())
        cache, tables = engine.cache, [[0, 1, 2], [5, 3, 4], [9, 8, 7]]
        model.hidden(tokens[:, :19], cache=cache.extend(tables, [0] * 3, [19] * 3, 19))
        for held in (*cache.keys.values(), *cache.values.values()):
            held.numbers[cache.padding_block] = noise
        step = engine.graphs.step(tokens[:, 19].tolist(), tables, [19] * 3)
        assert step is not None
        assert bool(step[1])
        assert len(step[0]) == 3
        logits.append(step[0].clone())
    assert torch.equal(*logits)
    torch.testing.assert_close(logits[0], model(tokens)[:, -1], rtol=1e-4, atol=1e-4)


def test_without_a_graph_steps_are_computed_and_the_reason_is_kept() -> None:
    def refuse(run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], object]]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    model = model_of()
    plain, refused = engine_of(model), engine_of(model, refuse)
    expected = [each.tokens for each in answered(plain)]
    assert [each.tokens for each in answered(refused)] == expected
    assert plain.graphs.obstacle == "the model is on a CPU"
    assert refused.graphs.obstacle is not None
    assert "operation not permitted when stream is capturing" in refused.graphs.obstacle
    crowded = engine_of(model_of(n_experts=4, expert_capacity=1.0), Recorder())
    assert "experts with a capacity" in str(crowded.graphs.obstacle)


@torch.inference_mode()
def test_steps_are_recorded_again_where_parameters_have_moved() -> None:
    model, recorder = Transformer(CONFIG, seed=1).eval(), Recorder()
    graphs = engine_of(model, recorder).graphs
    first = graphs.step([3], [[0]], [0])
    assert graphs.step([3], [[0]], [0]) is not None
    assert (recorder.recorded, recorder.replayed) == (1, 2)
    model.blocks[0].get_submodule("attention.output").get_parameter("weight").data = torch.zeros(32, 32)
    moved = graphs.step([3], [[0]], [0])
    assert (recorder.recorded, recorder.replayed) == (2, 3)
    assert first is not None
    assert moved is not None
    assert not torch.equal(moved[0], first[0])
    torch.testing.assert_close(moved[0], model(torch.tensor([[3]]))[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("record", [None, Recorder()], ids=["computed", "replayed"])
def test_the_host_reads_a_step_of_tokens_once(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a GPU, where reading waits: the compiled loops of a CPU are not taken.
    monkeypatch.setattr("napkin.inference.sampling.are_compiled", lambda logits: False)
    engine = engine_of(model_of(), record)
    settings = [
        Sampling(temperature=0.0),
        Sampling(temperature=0.7, top_p=0.9, seed=3),
        Sampling(top_k=5, min_p=0.1, top_p=1.0),
        Sampling(repetition_penalty=1.3, logit_bias=((3, 2.0), (7, -1.0))),
    ]
    for length, sampling in zip((5, 12, 3, 20), settings, strict=True):
        engine.submit(Request(list(range(1, length + 1)), 10, sampling, sampled_logprobs=True))
    while any(not each.decodes for each in engine.scheduler.running) or not engine.scheduler.running:
        engine.step()
    for _ in range(3):
        with host_waits(monkeypatch.setattr) as waits:
            engine.step()
        assert waits.of("") == {"tolist": 1}


def test_buckets_are_powers_of_two() -> None:
    assert [power_of_two(n) for n in (1, 2, 3, 5, 16, 17)] == [1, 2, 4, 8, 16, 32]
    assert [power_of_two(n, 512) for n in (1, 513)] == [512, 1024]
