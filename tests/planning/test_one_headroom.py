"""A step fits by the plan, by the search of layouts, by `napkin fit` and by the micro-batch search, or by none."""

import contextlib
import dataclasses

import pytest

from napkin.errors import NapkinError
from napkin.hardware.device_file import find_device
from napkin.planning.fit import Family, largest_model
from napkin.planning.layouts.layout_plan import plan_layout
from napkin.planning.layouts.search import SearchResult, with_best_counted, with_counted_bytes
from napkin.planning.planner import plan
from napkin.planning.step.machine import CatalogueMachine
from napkin.planning.step.memory_savings import largest_micro_batch, refuse_what_does_not_fit
from napkin.train_step.step_ledger import count_step

FAMILY = Family(vocab_size=512, context_length=64, batch_size=4, precision="fp32")
N_DEVICES, WIDTH, N_LAYERS = 2, 128, 2


def machine_of(usable_bytes: int) -> CatalogueMachine:
    device = dataclasses.replace(find_device("H100"), name="small", memory_bytes=600_000_000 + usable_bytes)
    return CatalogueMachine(device, N_DEVICES)


@pytest.mark.thorough
@pytest.mark.parametrize("room", [-1, 1], ids=["a byte less", "a byte more"])
def test_one_step_fits_by_every_command_or_by_none(room: int) -> None:
    resolved = FAMILY.resolved(machine_of(10**9), WIDTH, N_LAYERS)
    peak = count_step(resolved).peak_bytes
    # 5% is left free.
    machine = machine_of(round(peak / 0.95) + 2 * room)
    fits = room > 0

    planned = plan(resolved.recipe, machine)
    assert planned.peak_bytes == peak
    assert planned.fits is fits
    with contextlib.nullcontext() if fits else pytest.raises(NapkinError, match="for a step"):
        refuse_what_does_not_fit(planned)

    layout = with_counted_bytes(plan_layout(resolved, machine))
    assert layout.fits is fits
    with contextlib.nullcontext() if fits else pytest.raises(NapkinError, match="for a step"):
        with_best_counted(SearchResult([layout], [], 1, 1))

    found = largest_model(FAMILY, machine).recipe.model
    assert ((found.d_model, found.n_layers) == (WIDTH, N_LAYERS)) is fits
    assert (largest_micro_batch(resolved, machine.memory_bytes) == FAMILY.batch_size) is fits
