import dataclasses

import pytest

from napkin.errors import NapkinError
from napkin.hardware.device_file import find_device
from napkin.planning.fit import Family, largest_model
from napkin.planning.planner import plan
from napkin.planning.step.machine import CatalogueMachine

FAMILY = Family(vocab_size=512, context_length=64, batch_size=1, precision="fp32")


def device(usable_bytes: int):
    return dataclasses.replace(find_device("H100"), name="small", memory_bytes=600_000_000 + usable_bytes)


@pytest.mark.parametrize("n_devices", [1, pytest.param(4, marks=pytest.mark.torture)])
def test_the_model_found_fits_and_one_layer_more_does_not(n_devices: int) -> None:
    small = device(100_000_000)
    found = largest_model(FAMILY, CatalogueMachine(small, n_devices))
    assert found.ledger.peak_bytes <= 0.95 * small.usable_bytes
    machine, model = CatalogueMachine(small, n_devices), found.recipe.model
    assert FAMILY.count(machine, model.d_model, model.n_layers + 1).peak_bytes > 0.95 * small.usable_bytes
    # Nor does a wider model with a layer for each 128 of its width.
    wider = model.d_model + 128
    assert FAMILY.count(machine, wider, wider // 128).peak_bytes > 0.95 * small.usable_bytes


@pytest.mark.torture
def test_the_model_found_is_planned_again_with_the_same_bytes() -> None:
    machine = CatalogueMachine(device(100_000_000), 4)
    found = largest_model(FAMILY, machine)
    again = plan(found.recipe, machine)
    assert again.ledger.peak_bytes == found.ledger.peak_bytes <= 0.95 * machine.memory_bytes
    assert again.fits


@pytest.mark.torture
def test_where_the_peak_bends_upwards_the_model_found_still_fits() -> None:
    family = dataclasses.replace(FAMILY, vocab_size=32768, context_length=512)
    machine = CatalogueMachine(device(400_000_000), 8)
    # From one layer to two the head's moment is the peak, and grows more slowly than that of the backward pass.
    one, two, three = (family.count(machine, 512, n_layers).peak_bytes for n_layers in (1, 2, 3))
    assert two - one < three - two
    assert largest_model(family, machine).ledger.peak_bytes <= 0.95 * machine.memory_bytes


@pytest.mark.torture
def test_more_devices_hold_a_larger_model() -> None:
    small = device(100_000_000)
    sizes = [largest_model(FAMILY, CatalogueMachine(small, n_devices)).ledger.parameters for n_devices in (1, 8)]
    assert sizes == sorted(set(sizes))


def test_a_device_too_small_for_anything_is_told_so() -> None:
    with pytest.raises(NapkinError, match=r"layer.*width 128.*small.*1.00 MB"):
        largest_model(FAMILY, CatalogueMachine(device(1_000_000)))
