from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from napkin.accounting.operators import CONTRACTIONS, Work, work_of
from napkin.accounting.record import record
from oracles.brute_force_flops import ScalarProducts

aten, own = torch.ops.aten, torch.ops.napkin


def _flops(call: Callable[[], Any]) -> int:
    ledger = record(nn.Module(), call)
    assert not ledger.unknown_operators
    return ledger.flops


A, B, C = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.randn(3, 5)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.mm(A[0], B[0]),
        lambda: torch.bmm(A, B),
        lambda: torch.addmm(C, A[0], B[0]),
        lambda: C.clone().addmm_(A[0], B[0]),
        lambda: torch.baddbmm(C.expand(2, 3, 5), A, B),
        lambda: torch.mv(A[0], B[0, :, 0]),
        lambda: torch.dot(A[0, 0], B[0, :, 0]),
        lambda: torch.mm(A[0], B[0], out=torch.empty(3, 5)),
    ],
    ids=["mm", "bmm", "addmm", "addmm_", "baddbmm", "mv", "dot", "out"],
)
def test_products_cost_what_they_multiply_and_add(call: Callable[[], Tensor]):
    with ScalarProducts() as oracle:
        call()
    assert _flops(call) == oracle.flops > 0


@pytest.mark.parametrize(
    ("call", "same"),
    [
        (lambda: C.expand(2, 3, 5).clone().baddbmm_(A, B), lambda: torch.bmm(A, B)),
        (lambda: torch.addbmm(C, A, B), lambda: torch.bmm(A, B)),
        (lambda: torch.addmv(C[:, 0], A[0], B[0, :, 0]), lambda: torch.mv(A[0], B[0, :, 0])),
        (lambda: torch.vdot(A[0, 0], B[0, :, 0]), lambda: torch.dot(A[0, 0], B[0, :, 0])),
    ],
    ids=["baddbmm_", "addbmm", "addmv", "vdot"],
)
def test_a_products_other_forms_cost_the_same(call: Callable[[], Tensor], same: Callable[[], Tensor]):
    with ScalarProducts() as oracle:
        same()
    assert _flops(call) == oracle.flops


@pytest.mark.parametrize("form", ["rows of the left", "columns of the right", "summed over"])
def test_a_grouped_product_costs_what_its_groups_cost(form: str):
    ends = torch.tensor([16, 48], dtype=torch.int32)
    groups = [slice(0, 16), slice(16, 48)]
    wide, ragged, three = torch.ones(32, 48), torch.ones(48, 16), torch.ones(2, 16, 32)
    if form == "rows of the left":
        operands, parts = (ragged, three), [(ragged[group], three[i]) for i, group in enumerate(groups)]
    elif form == "columns of the right":
        operands, parts = (three, torch.ones(32, 48)), [(three[i], wide[:, group]) for i, group in enumerate(groups)]
    else:
        operands, parts = (wide, ragged), [(wide[:, group], ragged[group]) for group in groups]
    with ScalarProducts() as oracle:
        for left, right in parts:
            torch.mm(left, right)
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [operand.to(torch.bfloat16) for operand in operands]
        assert _flops(lambda: aten._grouped_mm(*given, offs=ends)) == oracle.flops


def test_recurrent_cells_cost_what_torch_counts():
    cell = nn.GRU(5, 7, num_layers=2)
    x = torch.ones(3, 2, 5)
    with FlopCounterMode(display=False) as counter:
        cell(x)[0].sum().backward()
    assert _flops(lambda: cell(x)[0].sum().backward()) == counter.get_total_flops()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 6), (6, 3)])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(8, 8), (8, 4)])
def test_attention_on_any_device_costs_what_its_pairs_cost(
    causal: bool, queries: int, keys: int, head_dim: int, value_dim: int
):
    shapes = [(2, 3, queries, head_dim), (2, 3, keys, head_dim), (2, 3, keys, value_dim)]
    query, key, value = (torch.randn(shape).requires_grad_() for shape in shapes)
    expected = {}
    for name, oracle in {
        "all": ScalarProducts(),
        "causal": ScalarProducts(skip_masked=True),
        "again": ScalarProducts(recompute_scores=True),
    }.items():
        with oracle:
            output = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
            forward = oracle.flops
            torch.autograd.backward(output.sum())
        expected[name] = (forward, oracle.flops)

    given = {"query": query, "key": key, "value": value}
    for kind in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"):
        whole = []
        for suffix in ("", "_backward"):
            operator = getattr(aten, f"_scaled_dot_product_{kind}{suffix}").default
            work = work_of(operator, (), {**given, "is_causal": causal}, None)
            assert isinstance(work, Work)
            whole.append(work)
        forward, backward = whole
        assert (forward.flops, forward.flops + backward.flops) == expected["all"]
        assert (forward.causal_flops, forward.causal_flops + backward.causal_flops) == expected["causal"]
        assert forward.flops + backward.flops + backward.recomputed_flops == expected["again"][1]


def test_every_formula_reads_arguments_that_its_operator_has():
    read = {
        "self mat2": "mm bmm _scaled_mm _grouped_mm",
        "mat1 mat2": "addmm addmm_",
        "batch1 batch2": "baddbmm baddbmm_ addbmm",
        "self": "mv dot vdot",
        "mat": "addmv",
        "input weight": "linear convolution convolution_backward",
        "query key value": " ".join(packet.__name__ for packet in CONTRACTIONS if "attention" in packet.__name__),
    }
    checked = set()
    for names, operators in read.items():
        for operator in operators.split():
            packet = getattr(aten, operator)
            for overload in packet.overloads():
                arguments = {argument.name for argument in getattr(packet, overload)._schema.arguments}
                assert set(names.split()) <= arguments, (operator, overload)
            checked.add(packet)
    for packet, names in ((own.grouped_matmul, "x weight"), (own.grouped_outer, "left right")):
        assert set(names.split()) <= {argument.name for argument in packet.default._schema.arguments}
        checked.add(packet)
    assert checked == set(CONTRACTIONS)
