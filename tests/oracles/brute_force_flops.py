"""The contractions of a step, done scalar by scalar in Python: a counter rises beside each multiplication and addition.

The oracle knows no formula. It stands in for torch's products while a model runs, forward and backward, and gives back
numbers: that losses and gradients equal torch's proves that what it counted is what had to be computed.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import napkin.kernels.products.grouped  # makes the operators of torch.ops.napkin  # noqa: F401


class ScalarProducts(TorchFunctionMode):
    """Counts, in `flops`, the multiplications and additions of every contraction that runs under it.

    With `skip_masked`, attention leaves out the pairs that a causal mask hides. With `recompute_scores`, attention
    stores no scores and computes them again in the backward pass, as flash attention does.
    """

    def __init__(self, *, skip_masked: bool = False, recompute_scores: bool = False) -> None:
        super().__init__()
        self.flops = 0
        self.skip_masked = skip_masked
        self.recompute_scores = recompute_scores
        self._around = ExitStack()

    def __enter__(self) -> "ScalarProducts":
        self._around.enter_context(_NoOtherProducts(self))
        # torch switches function modes off inside a backward pass; checkpointing runs modules there.
        switched_on: list[bool] = []

        def enter_module(*_: Any) -> None:
            switched_on.append(not _get_current_function_mode_stack())
            if switched_on[-1]:
                super(ScalarProducts, self).__enter__()

        def leave_module(*_: Any) -> None:
            if switched_on.pop():
                super(ScalarProducts, self).__exit__(None, None, None)

        self._around.callback(register_module_forward_pre_hook(enter_module).remove)
        self._around.callback(register_module_forward_hook(leave_module, always_call=True).remove)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._around.close()

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        own = _OWN.get(func)
        return own(self, *args, **kwargs or {}) if own else func(*args, **kwargs or {})

    def contract(self, equation: str, left: Tensor, right: Tensor, mask: Tensor | None = None) -> Tensor:
        """The einsum of two tensors; triples at which `mask`, over the labels i and j, is false are left out."""
        result: Any = _Contraction.apply(self, equation, left, right, mask)
        # A copy, since models may write into a product and a function's own result takes no writing into its views.
        return result.clone()

    def multiply_and_add(self, equation: str, left: Tensor, right: Tensor, mask: Tensor | None) -> Tensor:
        """The loops."""
        inputs, output = equation.split("->")
        labels = inputs.split(",")
        sizes = dict(zip("".join(labels), (*left.shape, *right.shape), strict=True))
        summed = "".join(dict.fromkeys(label for label in "".join(labels) if label not in output))
        if not summed:
            return torch.einsum(equation, left, right)  # an outer product: nothing is contracted
        a, b = left.reshape(-1).tolist(), right.reshape(-1).tolist()
        allowed = mask.reshape(-1).tolist() if mask is not None else [True]
        operands = [*labels, "ij" if mask is not None else ""]
        sums = list(_offsets(summed, operands, sizes))
        results = []
        for at_a, at_b, at_mask in _offsets(output, operands, sizes):
            total = 0.0
            for to_a, to_b, to_mask in sums:
                if allowed[at_mask + to_mask]:
                    total = total + a[at_a + to_a] * b[at_b + to_b]
                    self.flops += 2
            results.append(total)
        return torch.tensor(results, dtype=left.dtype).reshape([sizes[label] for label in output])


def _offsets(labels: str, operands: list[str], sizes: dict[str, int]) -> Any:
    """For each value of `labels`, how far it moves into each flattened operand."""
    strides = [
        [
            math.prod(sizes[later] for later in operand[operand.index(label) + 1 :]) if label in operand else 0
            for label in labels
        ]
        for operand in operands
    ]
    for index in product(*(range(sizes[label]) for label in labels)):
        yield tuple(sum(i * stride for i, stride in zip(index, own, strict=True)) for own in strides)


class _Contraction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, counter: ScalarProducts, equation: str, left: Tensor, right: Tensor, mask: Any) -> Tensor:
        ctx.counter, ctx.equation, ctx.mask = counter, equation, mask
        ctx.save_for_backward(left, right)
        return counter.multiply_and_add(equation, left, right, mask)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        left, right = ctx.saved_tensors
        inputs, output = ctx.equation.split("->")
        a, b = inputs.split(",")
        gradients: list[Tensor | None] = [None, None]
        if ctx.needs_input_grad[2]:
            gradients[0] = ctx.counter.multiply_and_add(f"{output},{b}->{a}", grad_outputs[0], right, ctx.mask)
        if ctx.needs_input_grad[3]:
            gradients[1] = ctx.counter.multiply_and_add(f"{a},{output}->{b}", left, grad_outputs[0], ctx.mask)
        return None, None, *gradients, None


class _NoOtherProducts(TorchDispatchMode):
    """Refuses torch's own products: none may pass uncounted. Those of gradients that are written out, which run where
    function modes are off, are done one by one too."""

    def __init__(self, counter: ScalarProducts) -> None:
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "bmm" and not _get_current_function_mode_stack():
            return self.counter.multiply_and_add("xij,xjk->xik", args[0], args[1], None)
        products = ("mm", "addmm", "bmm", "mv", "dot", "linear", "einsum", "trilinear")
        if (
            name.strip("_").removeprefix("add").removeprefix("badd") in products
            or "conv" in name
            or "attention" in name
            or "grouped" in name
        ):
            raise AssertionError(f"{name} ran beside the oracle")
        return func(*args, **kwargs or {})


def _linear(self: ScalarProducts, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = self.contract("nk,mk->nm", x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def _matmul(self: ScalarProducts, left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
    if right.dim() == 1:
        return self.contract("ik,k->i", left.reshape(-1, len(right)), right).reshape(left.shape[:-1])
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    a, b = (t.expand(*batch, *t.shape[-2:]).reshape(-1, *t.shape[-2:]) for t in (left, right))
    y = self.contract("nik,nkj->nij", a, b).reshape(*batch, a.shape[-2], b.shape[-1])
    return y if out is None else out.copy_(y)


def _added_matmul(
    self: ScalarProducts, x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return beta * x + alpha * _matmul(self, a, b)


def _added_matmul_in_place(self: ScalarProducts, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x.add_(_matmul(self, a, b))


def _einsum(self: ScalarProducts, equation: str, left: Tensor, right: Tensor) -> Tensor:
    return self.contract(equation.replace(" ", ""), left, right)


def _attention(
    self: ScalarProducts,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], dim=-3) for t in (key, value))
    shape = query.shape
    query, key, value = (t.reshape(-1, *t.shape[-2:]) for t in (query, key, value))
    pairs = (query.shape[-2], key.shape[-2])
    causal = torch.ones(pairs, dtype=torch.bool, device=query.device).tril() if is_causal else None
    skipped = causal if self.skip_masked else None
    mask = None if attn_mask is None else attn_mask.expand(*shape[:-2], *pairs).reshape(-1, *pairs)

    def weights(query: Tensor, key: Tensor) -> Tensor:
        scores = self.contract("nid,njd->nij", query, key, skipped) * (scale or shape[-1] ** -0.5)
        if causal is not None:
            scores = scores.masked_fill(~causal, -math.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        return scores.softmax(dim=-1)

    w = checkpoint(weights, query, key, use_reentrant=False) if self.recompute_scores else weights(query, key)
    return self.contract("nij,njd->nid", w, value, skipped).reshape(*shape[:-1], -1)


def _grouped_matmul(self: ScalarProducts, x: Tensor, weight: Tensor, begins: Tensor) -> Tensor:
    ends = [*begins.tolist()[1:], len(x)]
    groups = [
        self.contract("nk,mk->nm", x[begin:end], matrix)
        for begin, end, matrix in zip(begins.tolist(), ends, weight, strict=True)
    ]
    return torch.cat(groups)


def _self_attention(
    self: ScalarProducts, x: Tensor, key: Tensor, value: Tensor, d_model: int, n_heads: int, *given: Any, **more: Any
) -> tuple[Tensor, None]:
    """`nn.MultiheadAttention` over one input [position, batch, width], without masks or dropout."""
    assert x is key is value
    assert not more["need_weights"]
    in_weight, in_bias, _, _, _, _, out_weight, out_bias = given
    length, batch, width = x.shape
    q, k, v = (
        part.reshape(length, batch * n_heads, width // n_heads).transpose(0, 1)
        for part in _linear(self, x, in_weight, in_bias).chunk(3, dim=-1)
    )
    mixed = _attention(self, q, k, v).transpose(0, 1).reshape(length, batch, width)
    return _linear(self, mixed, out_weight, out_bias), None


def _conv(
    self: ScalarProducts,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    n_axes = weight.dim() - 2
    stride, padding, dilation = (_each(value, n_axes) for value in (stride, padding, dilation))
    x = F.pad(x, [pad for axis in reversed(range(n_axes)) for pad in (padding[axis],) * 2])
    for axis in range(n_axes):
        reach = dilation[axis] * (weight.shape[2 + axis] - 1) + 1
        x = x.unfold(2 + axis, reach, stride[axis])[..., :: dilation[axis]]
    # [batch, channel, position..., tap...] -> [n, group, position, channel and tap]
    batch, channels, positions = x.shape[0], x.shape[1] // groups, x.shape[2 : 2 + n_axes]
    x = x.reshape(batch, groups, channels, math.prod(positions), -1).transpose(2, 3).flatten(3)
    y = self.contract("ngpk,gok->ngop", x, weight.reshape(groups, -1, x.shape[-1])).reshape(batch, -1, *positions)
    return y if bias is None else y + bias.reshape(-1, *[1] * n_axes)


def _conv_transpose1d(
    self: ScalarProducts,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    (stride,), (padding,), (more,), (dilation,) = (_each(v, 1) for v in (stride, padding, output_padding, dilation))
    batch, _, length = x.shape
    taps = weight.shape[2]
    grouped = x.reshape(batch, groups, -1, length)
    spread = self.contract("ngip,giok->ngopk", grouped, weight.reshape(groups, -1, *weight.shape[1:])).flatten(1, 2)
    whole = x.new_zeros(batch, spread.shape[1], (length - 1) * stride + dilation * (taps - 1) + 1 + more)
    at = (stride * torch.arange(length)[:, None] + dilation * torch.arange(taps)).flatten()
    y = whole.index_add(2, at, spread.flatten(2))[..., padding : whole.shape[2] - padding]
    return y if bias is None else y + bias[:, None]


def _each(value: Any, n_axes: int) -> tuple[int, ...]:
    return (value,) * n_axes if isinstance(value, int) else tuple(value)


_OWN: dict[Any, Callable] = {
    F.linear: _linear,
    **dict.fromkeys(
        (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm), _matmul
    ),
    **dict.fromkeys((torch.mv, Tensor.mv, torch.dot, Tensor.dot), _matmul),
    **dict.fromkeys((torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm), _added_matmul),
    Tensor.addmm_: _added_matmul_in_place,
    torch.einsum: _einsum,
    F.scaled_dot_product_attention: _attention,
    torch.ops.napkin.grouped_matmul.default: _grouped_matmul,
    F.multi_head_attention_forward: _self_attention,
    **dict.fromkeys((F.conv1d, F.conv2d), _conv),
    F.conv_transpose1d: _conv_transpose1d,
}
