"""Every name of the tables runs; what is counted of it equals the formulas, and what cannot fit is refused by plan."""

from collections.abc import Callable

import pytest
import torch

from napkin.benchmarking.case import Case, Target, work_of
from napkin.benchmarking.measuring import Limits, Measuring, row_values
from napkin.benchmarking.module_target import MODULES, ModuleTarget
from napkin.benchmarking.operators import OPERATORS, OperatorTarget
from napkin.hardware.ceilings import CatalogueCeilings
from napkin.hardware.device_file import find_device
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe

FP32 = Precision("fp32", "cpu")
CEILINGS = CatalogueCeilings(find_device("H100"))
ROOMY = Limits(2**40)

# Sides without a common factor: a formula that takes one for another differs.
TINY = {
    "matmul": {"tokens": 6, "d_in": 10, "d_out": 14},
    "softmax": {"rows": 3, "columns": 5},
    "attention": {"batch_size": 2, "n_heads": 4, "n_kv_heads": 2, "context_length": 6, "head_dim": 10},
    "linear_cross_entropy": {"tokens": 6, "d_model": 10, "vocab_size": 14},
    "cross_entropy": {"tokens": 6, "vocab_size": 14},
    "rms_norm": {"tokens": 6, "d_model": 10},
    "layer_norm": {"tokens": 6, "d_model": 10},
    "rope": {"batch_size": 2, "context_length": 6, "n_heads": 2, "head_dim": 10},
    "swiglu": {"tokens": 6, "d_ff": 10},
    "gelu_tanh": {"tokens": 6, "d_ff": 10},
    "grouped_matmul": {"tokens": 6, "d_in": 10, "d_out": 14, "groups": 3},
    "fp8_linear": {"tokens": 6, "d_in": 10, "d_out": 14},
    "int8_linear": {"tokens": 24, "d_in": 16, "d_out": 32},
}
FLOPS: dict[str, Callable[[str], tuple[int, int]]] = {
    # Forward and backward: a product, and one for each of its two factors.
    "matmul": lambda form: (2 * 6 * 10 * 14, 2 * 2 * 6 * 10 * 14),
    "fp8_linear": lambda form: (2 * 6 * 10 * 14, 2 * 2 * 6 * 10 * 14),
    "int8_linear": lambda form: (2 * 24 * 16 * 32, 2 * 2 * 24 * 16 * 32),
    "grouped_matmul": lambda form: (2 * 6 * 10 * 14, 2 * 2 * 6 * 10 * 14),
    # The fused loss computes both gradients in its forward pass.
    "linear_cross_entropy": lambda form: (
        (3 * 2 * 6 * 10 * 14, 0) if form in ("fused", "compiled") else (2 * 6 * 10 * 14, 2 * 2 * 6 * 10 * 14)
    ),
    # Two products of all pairs, twice that backward; the fused form computes the 21 pairs on and below the diagonal,
    # and the scores once more in its backward pass.
    "attention": lambda form: (
        (2 * 2 * 8 * 21 * 10, 5 * 2 * 8 * 21 * 10)
        if form in ("fused", "compiled")
        else (2 * 2 * 8 * 36 * 10, 4 * 2 * 8 * 36 * 10)
    ),
}
TINY_MODEL = {
    "batch_size": 2,
    "d_model": 16,
    "n_layers": 2,
    "n_heads": 2,
    "d_ff": 24,
    "context_length": 6,
    "vocab_size": 10,
}


def measuring(target: Target, limits: Limits = ROOMY) -> Measuring:
    return Measuring(target, "cpu", CEILINGS, limits, seconds=1e-6)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", OPERATORS)
def test_every_form_of_every_operator_runs_and_its_flops_are_those_of_the_formula(name: str) -> None:
    target = OperatorTarget(name, "cpu")
    assert TINY.keys() == OPERATORS.keys()
    assert target.forms[0] == next(iter(OPERATORS[name].forms))
    for form in target.forms:
        passes = ("forward", "backward", "both")
        cases = [Case(target.whole(TINY[name]), form, FP32, timed) for timed in passes]
        rows = list(measuring(target).rows(cases))
        assert [len(row.samples) for row in rows] == [6, 6, 6], form
        assert all(row.work.bytes > 0 for row in rows[::2])
        forward, backward = FLOPS.get(name, lambda form: (0, 0))(form)
        assert [row.work.flops for row in rows] == [forward, backward, forward + backward], form


@pytest.mark.parametrize("name", [name for name, each in OPERATORS.items() if each.on_gpu_only | each.with_triton_only])
def test_forms_that_only_a_gpu_has_are_counted_without_one_in_every_format(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("napkin.benchmarking.operators.triton_is_installed", lambda: True)
    target = OperatorTarget(name, "cuda")
    shape = target.whole(TINY[name])
    # CUDA's fused attention pads narrow heads, and in fp32 takes no grouped queries.
    shape |= {"head_dim": 16, "n_kv_heads": 4} if "head_dim" in shape else {}
    flops = {"attention": 2 * 2 * 8 * 21 * 16, "fp8_linear": 2 * 6 * 10 * 14, "int8_linear": 2 * 24 * 16 * 32}
    flops["linear_cross_entropy"] = 3 * 2 * 6 * 10 * 14
    for form in OPERATORS[name].on_gpu_only | OPERATORS[name].with_triton_only:
        assert form in target.forms
        assert form not in OperatorTarget(name, "cpu").forms
        for precision in (Precision("bf16", "cuda"), Precision("fp32", "cuda")):
            work = work_of(target.ledger(Case(shape, form, precision, "forward")), "forward", CEILINGS)
            assert work.flops == flops.get(name, 0), form


@pytest.mark.parametrize("name", OPERATORS)
def test_the_forms_of_an_operator_compute_the_same_from_the_same_inputs(name: str) -> None:
    target = OperatorTarget(name, "cpu")
    results = []
    for form in target.forms:
        subject = target.subject(Case(target.whole(TINY[name]), form, FP32, "forward"))
        results.append(subject.module(*subject.inputs))
    for form, each in zip(target.forms[1:], results[1:], strict=True):
        if name == "rope":
            # They pair other numbers, and share the tables of one pairing.
            assert each.shape == results[0].shape
            continue
        # A product of numbers in eight bits keeps two digits.
        error = (each - results[0]).norm() / results[0].norm()
        assert error < (0.1 if name.endswith("8_linear") else 1e-5), form


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", MODULES)
def test_every_module_runs_in_every_pass_and_its_flops_are_those_of_the_formula(name: str) -> None:
    target = ModuleTarget(name, Recipe(), "cpu")
    shape = target.whole(TINY_MODEL)
    form = "gelu" if name == "mlp" else "plain"
    cases = [Case(shape, form, FP32, timed) for timed in target.passes]
    rows = list(measuring(target).rows(cases))
    assert all(len(row.samples) == 6 for row in rows)
    tokens, width = 2 * 6, 16
    # Per token: four square projections; scores and mixing with all 6 keys; two (gelu) or three (swiglu) products.
    attention, pairs = 4 * 2 * width**2, 2 * 2 * 6 * width
    feed_forward = 2 * (2 if name == "mlp" else 3) * width * 24
    head = 2 * width * 10
    forward = {
        "transformer": 2 * (attention + pairs + feed_forward) + 3 * head,
        "block": attention + pairs + feed_forward,
        "self-attention": attention + pairs,
        "mlp": feed_forward,
    }[name]
    assert rows[0].work.flops == tokens * forward
    backward = 2 * (forward - 3 * head) if name == "transformer" else 2 * forward
    assert rows[1].work.flops == tokens * backward
    assert [row.work.flops for row in rows[2:]] == [tokens * (forward + backward)] * len(rows[2:])


def test_the_roof_is_the_longer_of_flops_at_their_peak_and_bytes_at_their_bandwidth() -> None:
    target = OperatorTarget("matmul", "cpu")
    for sizes, bound in (((8192, 8192, 8192), "FLOPs"), ((2, 8192, 8192), "bytes")):
        m, k, n = sizes
        case = Case({"tokens": m, "d_in": k, "d_out": n}, "linear", FP32, "forward")
        work = next(measuring(target, Limits(0)).rows([case])).work
        arithmetic = 2 * m * n * k / CEILINGS.matmul_peak("fp32")
        moving = 4 * (m * k + k * n + m * n) / CEILINGS.bandwidth(1)
        assert work.bound == bound
        assert work.roof_seconds == pytest.approx(max(arithmetic, moving))
        assert work.planned_seconds > work.roof_seconds


@pytest.mark.thorough
def test_a_case_that_memory_or_time_do_not_suffice_for_by_plan_is_named_and_the_next_one_runs() -> None:
    target = ModuleTarget("transformer", Recipe(), "cpu")
    huge = Case(target.whole({"d_model": 8192, "d_ff": 32768, "n_layers": 3}), "plain", FP32, "step")
    small = Case(target.whole(TINY_MODEL), "plain", FP32, "step")
    refused, ran = measuring(target, Limits(2**30)).rows([huge, small])
    assert refused.refused.startswith("out of memory by plan: ")
    assert refused.refused.endswith("of 1.07 GB")
    # Weights, their gradients and two moments, of four square matrices and three of the feed-forward layer.
    assert refused.work.peak_bytes > 16 * 3 * (4 * 8192**2 + 3 * 8192 * 32768)
    assert refused.samples == ()
    assert refused.seconds is None
    assert len(ran.samples) == 6
    (slow,) = measuring(target, Limits(2**40, seconds=1e-9)).rows([small])
    assert slow.refused.startswith("too long by plan: ")
    assert slow.refused.endswith("for 8 calls")


def test_memory_that_runs_out_all_the_same_is_named_and_other_errors_are_not_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = OperatorTarget("swiglu", "cpu")
    case = Case(target.whole(TINY["swiglu"]), "kernel", FP32, "forward")
    monkeypatch.setattr(target, "subject", lambda case: torch.empty(2**60))
    (row,) = measuring(target).rows([case])
    assert row.refused.startswith("out of memory: ")
    monkeypatch.setattr(target, "subject", lambda case: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(measuring(target).rows([case]))


def test_two_forms_are_timed_in_turns_and_the_ratio_is_that_of_a_clock() -> None:
    target = OperatorTarget("softmax", "cpu")
    cases = [Case(target.whole(TINY["softmax"]), form, FP32, "forward") for form in target.forms]
    ticks = iter([9.0, 9.0, *[3.0, 1.0, 1.0, 3.0] * 3])

    def clock(call: Callable[[], object], calls: int) -> float:
        call()
        return next(ticks, 1.0)

    bench = Measuring(target, "cpu", CEILINGS, ROOMY, seconds=1e-6, clock=clock)
    row, alone = bench.rows(cases, (target.forms[1], False))
    assert row.samples == (3.0,) * 6
    assert row.ratio is not None
    assert (row.ratio.median, row.ratio.low, row.ratio.high) == (3.0, 3.0, 3.0)
    assert (alone.ratio, alone.against) == (None, "")
    values = row_values(row)
    assert values["against"] == target.forms[1]
    assert values["seconds"]["median"] == 3.0
    assert values["flops_per_second"] == 0


def test_drawing_inputs_leaves_the_global_random_state() -> None:
    before = torch.get_rng_state()
    for name in OPERATORS:
        target = OperatorTarget(name, "cpu")
        target.subject(Case(target.whole(TINY[name]), target.forms[0], FP32, "forward"))
    assert torch.equal(torch.get_rng_state(), before)
