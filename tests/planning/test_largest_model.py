import dataclasses

import pytest

from napkin.errors import NapkinError
from napkin.hardware.catalogue import find_device
from napkin.hardware.cuda_target import CudaTarget
from napkin.planning.largest_model import Family, largest_model
from napkin.recipe.precision import Precision

FAMILY = Family(
    vocab_size=512, context_length=64, batch_size=1, precision=Precision("fp32", "cuda"), target=CudaTarget()
)


def device(usable_bytes: int):
    return dataclasses.replace(find_device("H100"), name="small", memory_bytes=600_000_000 + usable_bytes)


@pytest.mark.parametrize("n_devices", [1, pytest.param(4, marks=pytest.mark.torture)])
def test_the_model_found_fits_and_one_layer_more_does_not(n_devices: int) -> None:
    small = device(100_000_000)
    found = largest_model(FAMILY, small, n_devices)
    assert found.peak_bytes <= small.usable_bytes
    more = FAMILY.count(found.config.d_model, found.config.n_layers + 1)
    assert more.sharded_peak_bytes(n_devices) + found.gathered_bytes > small.usable_bytes
    # Nor does a wider model with a layer for each 128 of its width.
    wider = found.config.d_model + 128
    ledger = FAMILY.count(wider, wider // 128)
    assert ledger.sharded_peak_bytes(n_devices) + found.gathered_bytes > small.usable_bytes


def test_where_the_peak_bends_upwards_the_model_found_still_fits() -> None:
    family = dataclasses.replace(FAMILY, vocab_size=16384, context_length=256)
    # From one layer to two the head's moment is the peak, and grows more slowly than that of the backward pass.
    one, two, three = (family.count(512, n_layers).sharded_peak_bytes(8) for n_layers in (1, 2, 3))
    assert two - one < three - two
    small = device(300_000_000)
    found = largest_model(family, small, 8)
    assert found.peak_bytes == found.ledger.sharded_peak_bytes(8) + found.gathered_bytes <= small.usable_bytes


@pytest.mark.torture
def test_more_devices_hold_a_larger_model() -> None:
    small = device(100_000_000)
    sizes = [largest_model(FAMILY, small, n_devices).ledger.parameters for n_devices in (1, 8)]
    assert sizes == sorted(set(sizes))


def test_a_device_too_small_for_anything_is_told_so() -> None:
    with pytest.raises(NapkinError, match=r"not even one layer of width 128 fits into the 1.00 MB of a small"):
        largest_model(FAMILY, device(1_000_000), 1)
