"""Plan a recipe for accelerators that are not at hand: its step is counted, and priced by the catalogue."""

import dataclasses
from typing import Literal

from napkin.accounting.compile_estimate import Compiling
from napkin.accounting.plan import Plan, Site
from napkin.accounting.pricing import price
from napkin.accounting.rules import all_reduce_seconds_rule
from napkin.hardware.catalogue import Device
from napkin.hardware.ceilings import CatalogueCeilings
from napkin.hardware.cuda_target import CudaTarget, Target
from napkin.planning.kernel_choice import choose_kernels
from napkin.planning.micro_batch import refuse_far_too_much
from napkin.planning.preparation import rule_bytes_per_parameter, rule_parameters, with_micro_batch
from napkin.recipe.per_device import share_of
from napkin.recipe.precision import Precision
from napkin.recipe.precision_formats import PrecisionName
from napkin.recipe.recipe import Recipe
from napkin.train_step.step import count_step
from napkin.training.start import vocab_size_of

CATALOGUE_FACTOR = 2.0
"""How far off the seconds may be where nothing was measured on the device; not verified yet."""


def plan_elsewhere(recipe: Recipe, device: Device, n_devices: int) -> tuple[Recipe, Precision, Plan]:
    """Count one device's part of a step, and price it by the device's datasheet.

    The devices hold the whole model each and split the batch; they add up their gradients over the device's link
    while the backward pass still runs. Returns the recipe of one device, which has that
    device's part of the batch.

    Raises NapkinError where the batch does not divide among the devices or the device lacks the precision.
    """
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, vocab_size=vocab_size_of(recipe)))
    share, precision = _one_share(recipe, device, n_devices)
    share = choose_kernels(share, precision)
    target = target_of(device)
    share = with_micro_batch(share, precision, device.usable_bytes, target=target)
    refuse_far_too_much(share, precision, device.name, device.usable_bytes, target=target)
    ledger = count_step(share, precision, target=target)
    priced = price(ledger, CatalogueCeilings(device), factor=CATALOGUE_FACTOR)
    site = Site(
        device_name=device.name,
        matmul_peak=device.peak(precision.products),
        memory_bytes=device.usable_bytes,
        bytes_per_second=device.memory_bandwidth,
        n_devices=n_devices,
        usd_per_hour=n_devices * device.price.usd_per_hour if device.price else None,
        watts=n_devices * device.watts if device.watts else None,
        target=target,
        measured=False,
    )
    backward = priced.by_phase["backward"].seconds
    plan = Plan(
        ledger=ledger,
        price=priced,
        site=site,
        rule_parameters=rule_parameters(recipe),
        rule_bytes_per_parameter=rule_bytes_per_parameter(recipe, precision),
        steps=recipe.training.steps,
        tokens_per_step=recipe.tokens_per_step,
        compiling=Compiling(why_not="the machine that trains decides whether that pays"),
        exchange_seconds=max(0.0, _exchange_seconds(ledger.parameters, device, n_devices) - backward),
    )
    return share, precision, plan


def target_of(device: Device) -> Target:
    """The device as a count depends on it; one that runs no PyTorch kernels of its own is counted as a CPU."""
    if device.compute_capability:
        return CudaTarget(device.compute_capability)
    # ROCm's PyTorch has the same allocator, and flash attention.
    return CudaTarget(cudnn_attention=False) if device.vendor == "AMD" else "cpu"


def _one_share(recipe: Recipe, device: Device, n_devices: int) -> tuple[Recipe, Precision]:
    """The recipe with one device's part of the batch, and the precision there."""
    share = share_of(recipe, n_devices)
    precision = _precision_on(device, share.training.precision)
    training = dataclasses.replace(share.training, precision=precision.name)
    return dataclasses.replace(share, training=training), precision


def _precision_on(device: Device, wanted: Literal["auto"] | PrecisionName) -> Precision:
    name = device.choose_format("auto") if wanted == "auto" else wanted
    precision = Precision(name, "cuda", native_fp8=name == "fp8" and "fp8" in device.peaks)
    device.peak(precision.products)
    return precision


def _exchange_seconds(parameters: int, device: Device, n_devices: int) -> float:
    bandwidth = device.link_bandwidth or device.host_bandwidth
    if n_devices == 1 or bandwidth is None:
        return 0.0
    bytes_of_a_gradient = 4
    return all_reduce_seconds_rule(bytes_of_a_gradient * parameters, n_devices, bandwidth)
