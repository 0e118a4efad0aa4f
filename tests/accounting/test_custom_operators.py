"""What the author of an operator declares is what a count and a meter say; what nobody declares is named."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from napkin import NapkinError, count, meter, reconcile
from napkin.accounting import OperatorWork, register_operator
from napkin.accounting.custom_operators import _FORMULAS


@torch.library.custom_op("napkin_test::fused_mlp", mutates_args=())
def fused_mlp(x: Tensor, up: Tensor, down: Tensor, scale: float = 1.0) -> Tensor:
    return (x @ up).relu() @ down * scale


@fused_mlp.register_fake
def _(x: Tensor, up: Tensor, down: Tensor, scale: float = 1.0) -> Tensor:
    return x.new_empty(*x.shape[:-1], down.shape[1])


@torch.library.custom_op("napkin_test::fused_mlp_backward", mutates_args=())
def fused_mlp_backward(gradient: Tensor, x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hidden = (x @ up).relu()
    inner = (gradient @ down.T) * (hidden > 0)
    return inner @ up.T, x.T @ inner, hidden.T @ gradient


@fused_mlp_backward.register_fake
def _(gradient: Tensor, x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(up), torch.empty_like(down)


def _backward(context: Any, gradient: Tensor) -> Any:
    return (*fused_mlp_backward(gradient, *context.saved_tensors), None)


fused_mlp.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:3]))


class MLP(nn.Module):
    """A layer of a library with kernels of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(8, 32)), nn.Parameter(torch.randn(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        return fused_mlp(x, self.up, self.down).sum()


class PlainMLP(MLP):
    """The same by torch's operators."""

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.up).relu() @ self.down).sum()


@pytest.fixture(autouse=True)
def no_registrations() -> Iterator[None]:
    before = dict(_FORMULAS)
    yield
    _FORMULAS.clear()
    _FORMULAS.update(before)


X = torch.zeros(16, 8)


def test_an_operator_that_nobody_declared_is_named_and_counted_in_calls_wherever_flops_are_shown() -> None:
    ledger = count(MLP(), X)
    names = {"napkin_test.fused_mlp.default": 1, "napkin_test.fused_mlp_backward.default": 1}
    assert ledger.unknown_operators == names
    assert "napkin_test.fused_mlp.default (1 ×)" in repr(ledger)
    with meter(MLP()) as measured:
        pass
    table = reconcile(ledger, measured)
    assert "napkin_test.fused_mlp.default (1 ×)" in next(r.note for r in table if r.quantity == "FLOPs per step")


def test_declared_operators_have_the_flops_of_the_plain_layer_traced_and_metered() -> None:
    @register_operator("napkin_test::fused_mlp")
    def forward(x: Tensor, up: Tensor, down: Tensor, scale: float) -> int:
        assert scale == 1.0
        return 2 * x.shape[0] * (up.numel() + down.numel())

    @register_operator(fused_mlp_backward)
    def backward(gradient: Tensor, x: Tensor, up: Tensor, down: Tensor) -> OperatorWork:
        # The plain layer needs no gradient of its input.
        flops = 2 * len(x) * (up.numel() + 2 * down.numel())
        return OperatorWork(flops=flops, recomputed_flops=2 * len(x) * up.numel(), elementwise_flops=len(x) * 32)

    plain, ledger = count(PlainMLP(), X), count(MLP(), X)
    assert (ledger.flops, ledger.forward_flops) == (plain.flops, plain.forward_flops)
    assert ledger.hardware_flops == plain.flops + 2 * 16 * 8 * 32
    assert not ledger.unknown_operators
    with meter(model := MLP()) as measured:
        for _ in range(3):
            with measured.step():
                model(X).backward()
                model.zero_grad()
    assert measured.flops == plain.flops


def test_declared_bytes_and_scratch_replace_those_of_the_tensors() -> None:
    def row(ledger: Any) -> Any:
        return next(row for row in ledger.rows if row.operator == "fused_mlp")

    before = count(MLP(), X)

    @register_operator(torch.ops.napkin_test.fused_mlp)
    def forward(result: Tensor, **others: Any) -> OperatorWork:
        assert result.shape == (16, 8)
        return OperatorWork(flops=10, bytes_read=7, bytes_written=5, scratch_bytes=10**6)

    after = count(MLP(), X)
    assert (row(after).bytes_read, row(after).bytes_written, row(after).flops) == (7, 5, 10)
    assert row(before).bytes_read == (X.numel() + 2 * 8 * 32) * 4
    assert after.peak_bytes >= 10**6 > before.peak_bytes


def test_formulas_that_a_library_gave_to_torch_are_used() -> None:
    @torch.library.custom_op("napkin_test::with_torch_formula", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return 2 * x

    @double.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @register_flop_formula(torch.ops.napkin_test.with_torch_formula)
    def formula(shape: Any, out_shape: Any = None, **others: Any) -> int:
        return 3 * shape[0] * out_shape[1]

    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return double(x)

    ledger = count(Doubling(), X)
    assert (ledger.flops, ledger.unknown_operators) == (3 * 16 * 8, {})


@pytest.mark.parametrize("value", [-1, 1.5, "many", None, True])
def test_an_impossible_declaration_is_refused_with_the_operators_name(value: Any) -> None:
    register_operator("napkin_test::fused_mlp")(lambda **given: value)
    with pytest.raises(NapkinError, match="napkin_test::fused_mlp"):
        count(MLP(), X)


def test_what_cannot_be_registered_is_refused() -> None:
    with pytest.raises(NapkinError, match="no operator 'napkin_test::absent'"):
        register_operator("napkin_test::absent")
    with pytest.raises(NapkinError, match="namespace::name"):
        register_operator("fused")
    with pytest.raises(NapkinError, match="aten::mm"):
        register_operator(torch.ops.aten.mm)
    with pytest.raises(NapkinError, match="lacks down, scale"):
        register_operator("napkin_test::fused_mlp")(lambda x, up: 0)
