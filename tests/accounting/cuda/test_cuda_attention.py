"""Cases by the rules in torch's documentation of scaled_dot_product_attention and in the checks of its kernels."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from napkin import Ledger, count
from napkin.accounting.cuda.attention import AttentionCall, choose_attention
from napkin.errors import NapkinError
from napkin.hardware.target import CudaTarget

V100, T4, A100, A10, L4, H100, B200, RTX5090 = (
    CudaTarget(capability) for capability in ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
)
FLASH, EFFICIENT, CUDNN, MATH = "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@dataclass
class Inputs:
    dtype: torch.dtype = BF16
    head_dim: int = 64
    value_dim: int | None = None
    heads: int = 4
    kv_heads: int = 4
    queries: int = 32
    keys: int = 32
    gqa: bool = False
    mask: tuple[int, ...] | None = None
    mask_trains: bool = False
    dropout: float = 0.0
    causal: bool = False
    trains: bool = True
    permuted: bool = False
    dims: int = 4

    def call(self) -> AttentionCall:
        shapes = [
            (2, self.heads, self.queries, self.head_dim),
            (2, self.kv_heads, self.keys, self.head_dim),
            (2, self.kv_heads, self.keys, self.value_dim or self.head_dim),
        ]
        tensors = [torch.empty(shape[4 - self.dims :], dtype=self.dtype) for shape in shapes]
        if self.permuted:
            tensors = [tensor.transpose(-1, -2).contiguous().transpose(-1, -2) for tensor in tensors]
        query, key, value = (tensor.requires_grad_(self.trains) for tensor in tensors)
        mask = None
        if self.mask is not None:
            mask = torch.ones(self.mask, dtype=self.dtype if self.mask_trains else torch.bool)
            mask.requires_grad_(self.mask_trains)
        return AttentionCall(query, key, value, mask, self.dropout, self.causal, None, self.gqa)


CASES = [
    (A100, Inputs(), FLASH),
    (A100, Inputs(dtype=FP16, causal=True, dropout=0.1), FLASH),
    (A100, Inputs(dtype=FP32), EFFICIENT),
    (A100, Inputs(dtype=FP64), MATH),
    # Flash takes no mask, the efficient form does, unless it is to be learnt.
    (A100, Inputs(mask=(32, 32)), EFFICIENT),
    (A100, Inputs(mask=(2, 1, 1, 32)), EFFICIENT),
    (A100, Inputs(mask=(2, 32, 32)), MATH),
    (A100, Inputs(mask=(3, 4, 32, 32)), MATH),
    (A100, Inputs(mask=(32, 32), mask_trains=True), MATH),
    # Grouped queries: flash and math alone; without the flag, nothing broadcasts heads.
    (A100, Inputs(kv_heads=2, gqa=True), FLASH),
    (A100, Inputs(kv_heads=2, gqa=True, dtype=FP32), MATH),
    (A100, Inputs(kv_heads=3, gqa=True), MATH),
    (A100, Inputs(kv_heads=2), MATH),
    (A100, Inputs(gqa=True, dtype=FP32), EFFICIENT),
    # Head dimensions.
    (A100, Inputs(head_dim=256), FLASH),
    (A100, Inputs(head_dim=264), EFFICIENT),
    (A100, Inputs(head_dim=257), MATH),
    (A100, Inputs(head_dim=52), FLASH),
    (A100, Inputs(head_dim=52, mask=(32, 32)), MATH),
    (A100, Inputs(head_dim=52, dtype=FP32), EFFICIENT),
    (A100, Inputs(head_dim=50, dtype=FP32), MATH),
    (A100, Inputs(head_dim=64, value_dim=128), EFFICIENT),
    # Causal masks of other than squares are aligned differently by flash attention.
    (A100, Inputs(causal=True, queries=16), EFFICIENT),
    (A100, Inputs(queries=16), FLASH),
    (A100, Inputs(queries=0), MATH),
    (A100, Inputs(permuted=True), MATH),
    (A100, Inputs(dims=3), MATH),
    # Ada and GA10x have too little shared memory for the backward pass of wide heads.
    (A10, Inputs(head_dim=192), FLASH),
    (A10, Inputs(head_dim=208), EFFICIENT),
    (A10, Inputs(head_dim=208, trains=False), FLASH),
    (L4, Inputs(head_dim=256), FLASH),
    (L4, Inputs(head_dim=256, dropout=0.1), EFFICIENT),
    (RTX5090, Inputs(head_dim=224), EFFICIENT),
    (RTX5090, Inputs(), FLASH),
    # Before Ampere: no flash, no bf16.
    (V100, Inputs(dtype=FP16), EFFICIENT),
    (V100, Inputs(dtype=FP32), EFFICIENT),
    (V100, Inputs(dtype=FP32, head_dim=50), EFFICIENT),
    (T4, Inputs(), MATH),
    (T4, Inputs(dtype=FP16, head_dim=52), MATH),
    # Hopper and data-centre Blackwell: cuDNN first where it takes the inputs.
    (H100, Inputs(causal=True), CUDNN),
    (B200, Inputs(), CUDNN),
    (H100, Inputs(mask=(32, 32)), CUDNN),
    (H100, Inputs(kv_heads=2, gqa=True), CUDNN),
    (H100, Inputs(dtype=FP32), EFFICIENT),
    (H100, Inputs(head_dim=136), FLASH),
    (H100, Inputs(head_dim=192, value_dim=128), CUDNN),
    (H100, Inputs(head_dim=52), FLASH),
    (H100, Inputs(dropout=0.125), CUDNN),
    (H100, Inputs(dropout=0.1), FLASH),
    (H100, Inputs(keys=1), FLASH),
    (CudaTarget((9, 0), cudnn_attention=False), Inputs(), FLASH),
]


@pytest.mark.parametrize(("target", "inputs", "expected"), CASES)
def test_the_form_is_the_one_that_torch_takes(target: CudaTarget, inputs: Inputs, expected: str):
    with FakeTensorMode():
        assert choose_attention(inputs.call(), target) == getattr(SDPBackend, expected)


def test_what_is_switched_off_is_not_taken_and_an_order_that_is_set_holds():
    with FakeTensorMode():
        call = Inputs().call()
        for name in (FLASH, EFFICIENT, CUDNN, MATH):
            with sdpa_kernel(getattr(SDPBackend, name)):
                assert choose_attention(call, A100) == getattr(SDPBackend, name)
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            assert choose_attention(call, H100) == SDPBackend.EFFICIENT_ATTENTION
        with (
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            pytest.raises(NapkinError, match=r"7\.0: enable SDPBackend") as refusal,
        ):
            choose_attention(call, V100)
    assert "\n" not in str(refusal.value)


class Attention(nn.Module):
    """Attends to what one matrix makes of the input; `options` go to scaled_dot_product_attention."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, **options: Any) -> None:
        super().__init__()
        self.sizes, self.head_dim, self.options = (heads, kv_heads, kv_heads), head_dim, options
        self.qkv = nn.Linear(8, sum(self.sizes) * head_dim, bias=False, dtype=dtype)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2).split(self.sizes, dim=1)
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=mask, **self.options)
        return mixed.transpose(1, 2).flatten(2)


def _kept(ledger: Ledger) -> int:
    return sum(row.bytes_kept for row in ledger.rows if row.operator.startswith("_scaled_dot_product"))


@pytest.mark.parametrize(
    ("target", "dtype", "statistics"),
    [
        # The log-sum-exp of each query, fp32; and seed (16 bytes), offset (8).
        (A100, BF16, 2 * 4 * 40 * 4 + 16 + 8),
        (H100, BF16, 2 * 4 * 40 * 4 + 8 + 8),
        # Rows of log-sum-exps are padded to 32.
        (A100, FP32, 2 * 4 * 64 * 4 + 8 + 8),
    ],
)
def test_each_form_keeps_its_output_and_the_statistics_of_its_softmax(
    target: CudaTarget, dtype: torch.dtype, statistics: int
):
    ledger = count(Attention(4, 4, 16, dtype, is_causal=True), torch.zeros(2, 40, 8, dtype=dtype), target=target)
    assert _kept(ledger) == 2 * 4 * 40 * 16 * dtype.itemsize + statistics
    # Two products forward, four back, over all pairs; and over those of the lower triangle.
    attention = [row for row in ledger.rows if row.operator.startswith("_scaled_dot_product")]
    assert sum(row.flops for row in attention) == 6 * 2 * 2 * 4 * 40 * 40 * 16
    assert sum(row.causal_flops for row in attention) == 6 * 2 * 2 * 4 * (40 * 41 // 2) * 16


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("target", [A100, H100], ids=["flash", "cudnn"])
def test_grouped_queries_cost_what_as_many_heads_cost_and_gather_gradients_by_query_head(
    kv_heads: int, target: CudaTarget
):
    module = Attention(4, kv_heads, 16, BF16, is_causal=True, enable_gqa=True)
    ledger = count(module, torch.zeros(2, 40, 8, dtype=BF16), target=target)
    (backward,) = (row for row in ledger.rows if row.operator.startswith("_scaled_dot") and "backward" in row.operator)
    assert backward.flops == 4 * 2 * 2 * 4 * 40 * 40 * 16
    outputs = 2 * 40 * 16 * 2 * (4 + 2 * kv_heads)
    rows, width = (128, 32) if target is A100 else (40, 16)
    by_query_head = 0 if kv_heads == 4 else 2 * 2 * 4 * 40 * 16 * 2
    assert backward.bytes_allocated == outputs + 4 * 2 * 4 * rows * (width + 1) + by_query_head


def test_the_math_form_holds_all_scores_where_no_kernel_takes_the_call():
    x = torch.zeros(2, 40, 8)
    grouped = Attention(4, 2, 16, FP32, is_causal=True, enable_gqa=True)
    assert any(row.operator == "bmm" for row in count(grouped, x, target=A100).rows)
    assert not any("scaled_dot_product" in row.operator for row in count(grouped, x, target=A100).rows)


def test_masks_become_numbers_and_rows_of_eight():
    x, mask = torch.zeros(2, 36, 8, dtype=BF16), torch.ones(36, 36, dtype=torch.bool)
    rows = count(Attention(4, 4, 16, BF16), (x, mask), target=A100).rows
    assert [row.bytes_allocated for row in rows if row.operator == "constant_pad_nd"] == [36 * 40 * 2]
    assert any(row.operator == "_scaled_dot_product_efficient_attention" for row in rows)


def test_heads_of_other_than_multiples_of_eight_are_padded_for_flash_attention():
    rows = count(Attention(4, 4, 12, BF16), torch.zeros(2, 40, 8, dtype=BF16), target=A100).rows
    (forward,) = (row for row in rows if row.operator == "_scaled_dot_product_flash_attention")
    assert forward.contraction == (2 * 4, 40, 40, 16)
