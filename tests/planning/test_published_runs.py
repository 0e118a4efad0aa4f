"""The planner's seconds beside published ones: a few rows of benchmarks/*.csv, of each generation and program."""

import functools
import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from napkin.hardware.ceilings import CatalogueCeilings, efficiency_of
from napkin.hardware.device_file import find_device
from napkin.planning.step.site import fits

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
B200 = find_device("B200")

ROWS = {
    # Program, model, device, ranks of tensor, pipeline and context, tokens: the first row of these.
    "tensor ranks, B200": ("Megatron-LM", "llama-3-70b", "B200-SXM-180GB", "2", "1", "1", 4096),
    "a larger model than any that was fitted to": (
        "Megatron-LM",
        "llama-3-405b",
        "B200-SXM-180GB",
        "4",
        "1",
        "1",
        4096,
    ),
    "pipeline ranks": ("Megatron-LM", "llama-3-405b", "B200-SXM-180GB", "1", "2", "1", 4096),
    "context ranks": ("Megatron-LM", "llama-3-70b", "B200-SXM-180GB", "1", "1", "8", 131072),
    "an interleaved pipeline of A100": ("Megatron-LM", "turing-530b", "A100-SXM-80GB", "8", "35", "1", 2048),
    "FSDP on H100": ("torchtitan", "llama-3-8b", "H100-SXM-96GB", "1", "1", "1", 8192),
}


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that reads published rows."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("published_recipes")


@functools.cache
def _rows(read: Any, name: str) -> list[dict[str, str]]:
    return read(name)


@pytest.mark.thorough
@pytest.mark.parametrize("case", ROWS)
def test_planned_seconds_are_those_of_a_published_run_within_the_stated_factor(published: Any, case: str) -> None:
    stack, model, device, tensor, pipeline, context, length = ROWS[case]
    wanted = {
        "stack": stack,
        "model": model,
        "device": device,
        "tensor": tensor,
        "pipeline": pipeline,
        "context": context,
        "context_length": str(length),
    }
    row = next(row for row in _rows(published.read_rows, "published_layouts.csv") if wanted.items() <= row.items())
    run = published.PublishedRun(row)
    plan = run.plan()
    assert abs(math.log(plan.seconds / run.seconds)) <= math.log(plan.factor)
    assert plan.factor < 1.3


KEPT = {
    # Program, model, device, ranks of tensor, pipeline, context and expert, tokens: the first row of these, in GiB.
    "tensor ranks": ("Megatron-LM", "llama-3-70b", "B200-SXM-180GB", "2", "1", "1", "1", 4096),
    "pipeline ranks": ("Megatron-LM", "llama-3-405b", "B200-SXM-180GB", "1", "2", "1", "1", 4096),
    "context ranks": ("Megatron-LM", "llama-3-70b", "B200-SXM-180GB", "1", "1", "8", "1", 131072),
    "experts": ("Megatron-LM", "deepseek-v3", "B200-SXM-180GB", "1", "2", "1", "4", 4096),
    "FSDP": ("torchtitan", "llama-3-8b", "H100-SXM-96GB", "1", "1", "1", "1", 8192),
    "weights sharded over context": ("torchtitan", "llama-3-8b", "H100-SXM-96GB", "1", "1", "8", "1", 262144),
}


@pytest.mark.parametrize("case", KEPT)
def test_bytes_that_another_stack_keeps_are_those_that_were_published(published: Any, case: str) -> None:
    names = ("stack", "model", "device", "tensor", "pipeline", "context", "expert")
    wanted = {**dict(zip(names, KEPT[case], strict=False)), "context_length": str(KEPT[case][-1])}
    row = next(row for row in _rows(published.read_rows, "published_layouts.csv") if wanted.items() <= row.items())
    run = published.PublishedRun(row)
    assert run.peak_bytes == pytest.approx(float(row["peak_gib"]) * 2**30, rel=0.08)


def test_published_runs_fit_by_their_plans_and_those_that_ran_out_of_memory_do_not(published: Any) -> None:
    for row in _rows(published.read_rows, "published_memory.csv"):
        run = published.PublishedRun(row)
        assert fits(run.peak_bytes, run.device.usable_bytes) == (row["ran"] == "yes"), row
        if row["peak_gib"]:
            assert run.peak_bytes == pytest.approx(float(row["peak_gib"]) * 2**30, rel=0.14)


@pytest.mark.thorough
def test_a_program_that_fuses_is_planned_faster_than_the_same_without(published: Any) -> None:
    rows = _rows(published.read_rows, "published_layouts.csv")
    row = next(row for row in rows if row["stack"] == "torchtitan" and row["precision"] == "bf16")
    seconds = {fused: published.PublishedRun(row | {"fused": fused}).plan().seconds for fused in ("no", "yes")}
    assert seconds["yes"] < 0.95 * seconds["no"]


def test_every_published_row_has_a_device_a_model_and_a_layout_of_its_devices(published: Any) -> None:
    tables = [f"published_{name}.csv" for name in ("layouts", "stacks", "memory", "six", "tuning", "gpu_hours")]
    for name in tables:
        for row in _rows(published.read_rows, name):
            device = find_device(row["device"])
            sizes = ("data", "shard", "tensor", "pipeline", "context")
            assert math.prod(int(row[size]) for size in sizes) == int(row["devices"]), row
            model = published.model_of(row["model"], int(row["context_length"]), int(row.get("n_layers") or 0) or None)
            assert model.n_layers % (int(row["pipeline"]) or 1) < model.n_layers
            assert row["source"]
            assert device.peaks


def test_products_and_attention_of_a_b200_reach_about_what_was_measured_on_one(published: Any) -> None:
    ceilings = CatalogueCeilings(B200)
    errors: dict[str, list[float]] = {"matmul": [], "attention, causal": []}
    for row in _rows(published.read_rows, "published_kernels.csv"):
        if row["device"] != B200.name or row["kernel"] not in errors:
            continue
        heads, m, n, k = (int(row[name]) for name in ("batch", "m", "n", "k"))
        attention = row["kernel"] != "matmul"
        rate = (
            ceilings.attention_rate("bf16", m, n, k, heads=heads, cudnn=True)
            if attention
            else ceilings.matmul_rate("bf16", m, n, k)
        )
        errors[row["kernel"]].append(abs(rate / (1e12 * float(row["tflops"])) - 1))
    assert len(errors["matmul"]) > 20
    # Coefficients come from whole steps, and single kernels were not fitted to.
    assert np.median(errors["matmul"]) < 0.12
    assert np.median(errors["attention, causal"]) < 0.2


def test_llama_on_h100_and_on_b200_differ_by_more_than_their_peaks_say(published: Any) -> None:
    # A B200 in a long run reaches less of its datasheet than an H100: a constant MFU would be wrong on one of them.
    shares = {name: efficiency_of(find_device(name)).matmul_share for name in ("A100", "H100", "B200")}
    assert shares["A100"] > shares["H100"] > shares["B200"]
