"""Which runs take Triton's kernels: those whose plan is faster with them, where they run."""

import dataclasses
import sys
from typing import Any, Literal

import pytest

from napkin.hardware.device_file import find_device
from napkin.model.config import ModelConfig
from napkin.planning.planner import resolve
from napkin.planning.step.kernel_choice import fastest, planned_seconds
from napkin.planning.step.machine import CatalogueMachine, ThisMachine
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import TrainingConfig

BF16 = Precision("bf16", "cuda")


class HereIsAGPU(CatalogueMachine):
    """An H100 of the catalogue as if it were this machine's."""

    measured = True

    def __init__(self, obstacle: str | None = None) -> None:
        super().__init__(find_device("H100"))
        self.obstacle = obstacle

    def triton_obstacle(self) -> str | None:
        return self.obstacle


def recipe(kernels: str = "auto", compile: Literal["auto", "on", "off"] = "off", **model: Any) -> Recipe:
    config = ModelConfig(2048, 512, **{"d_model": 512, "n_layers": 2, "n_heads": 8, **model})
    settings: Any = {"kernels": kernels, "compile": compile}
    return Recipe(model=config, training=TrainingConfig(batch_size=8, micro_batch_size=4, precision="bf16", **settings))


def chosen(wanted: Recipe, machine: CatalogueMachine) -> tuple[str, str]:
    found = resolve(wanted, machine).recipe
    return found.training.kernels, found.model.attention


@pytest.mark.thorough
def test_a_gpu_with_triton_takes_its_kernels_and_the_attention_that_is_planned_to_be_faster() -> None:
    # torch's fused attention recomputes less than napkin's; where it has no form for a cap, or needs a mask, it is
    # plain or computes what is hidden.
    assert chosen(recipe(), HereIsAGPU()) == ("triton", "sdpa")
    assert chosen(recipe(attention_softcap=30.0), HereIsAGPU()) == ("triton", "flash")
    assert chosen(recipe(attention_window=64), HereIsAGPU()) == ("triton", "flash")
    assert chosen(recipe("triton", attention="plain"), HereIsAGPU()) == ("triton", "plain")
    assert chosen(recipe("triton", positions="alibi"), HereIsAGPU()) == ("triton", "sdpa")


def test_the_choice_is_the_smaller_of_the_planned_seconds() -> None:
    machine, wanted = HereIsAGPU(), recipe()
    candidates = [
        dataclasses.replace(wanted, training=dataclasses.replace(wanted.training, kernels=kernels))
        for kernels in ("plain", "triton")
    ]
    plain, triton = (planned_seconds(each, BF16, machine) for each in candidates)
    assert triton < plain
    assert fastest(candidates, lambda each: planned_seconds(each, BF16, machine)) is candidates[1]
    # Of equals the first, which is plain.
    assert fastest(candidates, lambda _: 1.0) is candidates[0]


@pytest.mark.parametrize(
    ("machine", "wanted"),
    [
        (HereIsAGPU("triton is not installed"), recipe()),
        (CatalogueMachine(find_device("H100")), recipe()),
        (HereIsAGPU(), recipe("plain")),
        (CatalogueMachine(find_device("H100")), recipe(compile="on")),
    ],
    ids=["no triton", "another machine", "plain is named", "compiled"],
)
def test_plain_kernels_elsewhere(machine: CatalogueMachine, wanted: Recipe) -> None:
    assert chosen(wanted, machine) == ("plain", "sdpa")


def test_kernels_that_are_named_are_taken_on_every_gpu() -> None:
    assert chosen(recipe("triton"), CatalogueMachine(find_device("H100"))) == ("triton", "sdpa")
    assert chosen(recipe("triton"), CatalogueMachine(find_device("MI300X")))[0] == "triton"


def test_a_machine_without_triton_says_so_in_one_line_and_trains_with_plain_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.warns(UserWarning, match="^training.kernels is 'triton', but .*; 'plain' is taken instead$"):
        assert resolve(recipe("triton"), ThisMachine(device="cpu")).recipe.training.kernels == "plain"
