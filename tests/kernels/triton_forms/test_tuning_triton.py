"""Tuning of a whole step's launches in the interpreter, with a timer that is passed in."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.triton_forms.test_training_step_triton import DOCUMENTS, TARGETS, TOKENS, state_of
from napkin.benchmarking.kernel_tuning import TunableLaunch, tunable_launches, tune
from napkin.kernels.triton_tiles import Device, TunedTiles, keep_choices, load_choices

DEVICE = Device("interpreter", "0.0", "3.8.0", "0")


def launches_of(model: str) -> list[TunableLaunch]:
    state = state_of(model, "triton", "flash")
    return tunable_launches(lambda: state.step(0, TOKENS, TARGETS, DOCUMENTS))


@pytest.mark.parametrize(
    ("model", "kernels"),
    [
        ("gpt2", {"norm", "norm backward", "gelu", "gelu backward"}),
        ("experts", {"rotation", "swiglu", "swiglu backward", "grouped product", "grouped outer product"}),
    ],
)
def test_each_kernel_of_a_step_is_found_once_for_each_width(model: str, kernels: set[str]) -> None:
    found = [launch.lookup for launch in launches_of(model)]
    attention = {f"attention {name}" for name in ("forward", "backward_keys", "backward_queries")}
    assert kernels | attention | {"cross-entropy"} <= {lookup.kernel for lookup in found}
    assert len({(each.kernel, each.width, each.variant) for each in found}) == len(found)


def test_the_tile_that_the_timer_prefers_is_kept_if_it_gives_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAPKIN_CACHE_DIR", str(tmp_path))
    calls: list[int] = []

    def seconds_of(run: Callable[[], object]) -> float:
        # Of each launch, the first is the default; the second is faster than all others.
        calls.append(1)
        return 0.5 if len(calls) == 2 else 1.0

    for launch in launches_of("gpt2"):
        calls.clear()
        (choice,) = tune([launch], seconds_of)
        assert choice.microseconds == 0.5e6
        assert choice.default_microseconds == 1e6
        assert len(calls) > 2
        keep_choices(DEVICE, [choice])
    kept = load_choices(DEVICE)
    assert isinstance(kept, TunedTiles)
    assert {choice.kernel for choice in kept.choices} >= {"gelu", "attention forward"}
