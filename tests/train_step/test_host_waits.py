"""The host waits for a GPU at most once in a step, and never between its micro-batches."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from napkin.accounting.metering import Stopwatch
from napkin.chats.token_sequence import TokenSequence
from napkin.model.config import ModelConfig
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.train_step.step import TrainState, build_train_state
from napkin.training.non_finite import Verdict
from napkin.tuning.example_method import SupervisedObjective
from napkin.tuning.sequence_step import train_on_examples
from oracles.host_waits import HostWaits, host_waits


def train_state(optimizer: str = "adamw", precision: str = "fp32", **model: Any) -> TrainState:
    config = ModelConfig(61, context_length=16, d_model=16, n_layers=2, n_heads=2, **model)
    recipe = Recipe(
        model=config,
        optimizer=OptimizerConfig(name=optimizer, average_decay=0.9).resolved,
        training=TrainingConfig(batch_size=6, micro_batch_size=2, precision=precision),  # pyright: ignore[reportArgumentType]
    )
    return build_train_state(ResolvedRecipe(recipe, Precision(precision, "cpu")))  # pyright: ignore[reportArgumentType]


def labelled(waits: HostWaits) -> Any:
    """A watch that labels what is counted by the part of the step, and what is between parts by "between"."""

    @contextmanager
    def watch(part: str) -> Iterator[None]:
        waits.label = part
        yield
        waits.label = "between"

    return watch


CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {"optimizer": "muon"},
    "adafactor": {"optimizer": "adafactor"},
    "dropout windows softcap": {"dropout": 0.1, "attention_window": 5, "attention_softcap": 20.0},
    "capacity experts": {"n_experts": 4, "expert_capacity": 1.0},
    "fp16": {"precision": "fp16"},
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_once_before_its_update(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = train_state(**CASES[name])
    tokens = torch.randint(61, (6, 16), generator=torch.Generator().manual_seed(0))
    documents = torch.arange(16).expand(6, 16) // 5
    for number in range(2):
        verdict = Verdict(state.send_expert_tokens)
        with host_waits(monkeypatch.setattr) as waits:
            weights = state.micro_batch_weights(tokens)
            state.step(number, tokens, tokens, documents, weights=weights, watch=labelled(waits), is_fit=verdict)
            # The copy was queued before the wait, and has arrived with it.
            assert waits.of("optimizer") == {"cpu": 1}
            assert waits.total == 1
        tokens_per_expert, _ = state.expert_tokens()
        assert (tokens_per_expert is None) == ("experts" not in name)


def test_an_evaluations_sums_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    state = train_state(dropout=0.1)
    tokens = torch.randint(61, (6, 16), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1).masked_fill(torch.arange(16) % 3 == 0, -1)
    state.model.eval()
    # On a CPU, whose numbers are there at once, the head leaves out rows without a target; elsewhere it takes all.
    monkeypatch.setattr("napkin.model.transformer.has_numbers", lambda x: False)
    with torch.no_grad(), host_waits(monkeypatch.setattr) as waits:
        nats = state.parallel_model.evaluation_nats(tokens, targets)
    assert waits.total == 0
    with torch.no_grad():
        logits = state.model(tokens)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    assert nats.dtype == torch.float64
    assert float(nats) == pytest.approx(float(expected) * 6 * 10, rel=1e-5)


def test_a_step_on_sequences_waits_once_though_its_objective_has_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    state = train_state()
    draw = np.random.default_rng(0)
    examples = [
        (TokenSequence(draw.integers(61, size=n).astype(np.int64), np.arange(n) > 2),) for n in (9, 12, 5, 14, 7, 16)
    ]
    with host_waits(monkeypatch.setattr) as waits:
        step = train_on_examples(
            state, 0, examples, SupervisedObjective(), max_tokens=32, watch=labelled(waits), is_fit=Verdict()
        )
        assert waits.of("optimizer") == {"cpu": 1}
        assert waits.of("forward") == waits.of("backward") == {}
    assert step.metrics
    assert step.loss > 0


class Event:
    """A CUDA event on a device that is `now` seconds far, and `done` with what was launched up to then."""

    now = 0.0
    done = 0.0
    waits = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return self.at <= Event.done

    def synchronize(self) -> None:
        Event.waits += not self.query()
        Event.done = max(Event.done, self.at)

    def elapsed_time(self, end: "Event") -> float:
        assert end.query()
        return (end.at - self.at) * 1000


def test_parts_of_a_step_on_a_gpu_are_timed_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = Stopwatch("cuda")
    for number in range(3):
        for part, seconds in {"forward": 1.0, "backward": 2.0}.items():
            with watch(part):
                Event.now += seconds
        Event.done = 3.0 * number
    with watch("optimizer"):
        Event.now += 0.5
    assert Event.waits == 0
    assert watch.seconds == {"forward": 3.0, "backward": 6.0, "optimizer": 0.5}
    assert Event.waits == 1


def test_what_reads_a_tensor_on_the_host_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.arange(3.0)
    with host_waits(monkeypatch.setattr) as waits:
        numbers[0].item()
        numbers.tolist()
        assert numbers[1] > 0
        numbers[numbers > 0] += 1
        read = numbers.cpu()
        assert float(read[0]) == float(read.sum()) - 5 == 0.0
    assert waits.of("") == {"item": 1, "tolist": 1, "__bool__": 1, "index": 1, "index_put_": 1, "cpu": 1}
