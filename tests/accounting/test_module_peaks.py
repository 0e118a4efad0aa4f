"""The traced peak of many layers and functions of torch is the allocator's, or the ledger names what is not counted."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from napkin import count
from napkin.accounting import scratch
from oracles.allocator import growth_at_peak, storage_bytes

pytestmark = pytest.mark.usefixtures("one_thread")


class Of(nn.Module):
    """The sum of what a function makes of a layer's output."""

    def __init__(self, layer: nn.Module, act: Callable[[Any], Tensor] = lambda y: y) -> None:
        super().__init__()
        self.layer, self.act = layer, act

    def forward(self, *x: Tensor) -> Tensor:
        y = self.layer(*x)
        return self.act(y[0] if isinstance(y, tuple) else y).float().sum()


IMAGE, ROWS, TEXT = (4, 16, 32, 32), (64, 128), (4, 48, 64)


def of_image(act: Callable[[Any], Tensor]) -> tuple[Of, tuple[int, ...]]:
    return Of(nn.Conv2d(16, 16, 1), act), IMAGE


def of_rows(act: Callable[[Any], Tensor]) -> tuple[Of, tuple[int, ...]]:
    return Of(nn.Linear(128, 256), act), ROWS


def of_text(act: Callable[[Any], Tensor]) -> tuple[Of, tuple[int, ...]]:
    return Of(nn.Linear(64, 64), act), TEXT


def definite(y: Tensor) -> Tensor:
    return y[:, :32] @ y[:, :32].mT / 64 + torch.eye(32, dtype=y.dtype)


def picked(y: Tensor) -> Tensor:
    return torch.zeros(y.shape, dtype=torch.int64)


TARGETS = torch.arange(64) % 256

CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (Of(nn.Linear(256, 512)), (64, 256)),
    "linear of sequences": (Of(nn.Linear(256, 512, bias=False)), (4, 32, 256)),
    "two layers": (Of(nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))), ROWS),
    "convolution": (Of(nn.Conv2d(16, 32, 3, padding=1)), IMAGE),
    "in groups": (Of(nn.Conv2d(16, 32, 3, stride=2, groups=4)), IMAGE),
    "dilated": (Of(nn.Conv2d(16, 32, 3, dilation=2)), IMAGE),
    "one dimension": (Of(nn.Conv1d(16, 32, 5)), (4, 16, 256)),
    "three dimensions": (Of(nn.Conv3d(8, 8, 3)), (6, 8, 10, 10, 10)),
    "transposed": (Of(nn.ConvTranspose2d(16, 32, 3, stride=2)), IMAGE),
    "batch norm": of_image(nn.BatchNorm2d(16)),
    "layer norm": of_text(nn.LayerNorm(64)),
    "layer norm without parameters": of_text(lambda y: F.layer_norm(y, (64,))),
    "group norm": of_image(nn.GroupNorm(4, 16)),
    "instance norm": of_image(nn.InstanceNorm2d(16, affine=True)),
    "RMS norm": of_text(nn.RMSNorm(64)),
    "max pool": of_image(nn.MaxPool2d(2)),
    "mean pool": of_image(nn.AvgPool2d(3, 1)),
    "adaptive pool": of_image(nn.AdaptiveAvgPool2d(5)),
    "adaptive max pool": of_image(nn.AdaptiveMaxPool2d(5)),
    "power pool": of_image(nn.LPPool2d(2, 3)),
    "unfold": of_image(nn.Unfold(3, padding=1)),
    "fold": (Of(nn.Linear(64, 64), lambda y: F.fold(y.transpose(1, 2), (16, 16), 4, stride=2)), (4, 49, 64)),
    "pixel shuffle": of_image(nn.PixelShuffle(2)),
    "nearest": of_image(nn.Upsample(scale_factor=2)),
    "bilinear": of_image(nn.Upsample(scale_factor=2, mode="bilinear")),
    "bilinear to fewer": of_image(lambda y: F.interpolate(y, size=(20, 20), mode="bilinear")),
    "bicubic": of_image(nn.Upsample(scale_factor=2, mode="bicubic")),
    "area": of_image(lambda y: F.interpolate(y, size=(20, 20), mode="area")),
    "reflected": of_image(nn.ReflectionPad2d(2)),
    "replicated": of_image(nn.ReplicationPad2d(2)),
    "circular": of_image(nn.CircularPad2d(2)),
    "dropout": of_image(nn.Dropout(0.3)),
    "ELU": of_rows(nn.ELU()),
    "GLU": of_rows(nn.GLU()),
    "PReLU": of_rows(lambda y: F.prelu(y, torch.ones(256, dtype=y.dtype))),
    "log sigmoid": of_rows(nn.LogSigmoid()),
    "softmax": of_rows(nn.Softmax(-1)),
    "hard swish": of_rows(nn.Hardswish()),
    "soft shrink": of_rows(nn.Softshrink()),
    "cross-entropy": of_rows(lambda y: F.cross_entropy(y, TARGETS)),
    "smoothed cross-entropy": of_rows(lambda y: F.cross_entropy(y, TARGETS, label_smoothing=0.1)),
    "squared error": of_rows(lambda y: F.mse_loss(y, torch.zeros_like(y))),
    "Huber": of_rows(lambda y: F.huber_loss(y, torch.zeros_like(y))),
    "smooth L1": of_rows(lambda y: F.smooth_l1_loss(y, torch.zeros_like(y))),
    "binary cross-entropy": of_rows(lambda y: F.binary_cross_entropy_with_logits(y, torch.zeros_like(y))),
    "soft margin": of_rows(lambda y: F.soft_margin_loss(y, torch.ones_like(y))),
    "triplet": of_rows(lambda y: F.triplet_margin_loss(y, y * 0.5, y + 1)),
    "Kullback-Leibler": of_rows(lambda y: F.kl_div(y, torch.ones_like(y), reduction="batchmean")),
    "LSTM": (Of(nn.LSTM(64, 64, batch_first=True)), TEXT),
    "GRU": (Of(nn.GRU(64, 64, batch_first=True)), TEXT),
    "attention": of_text(lambda y: F.scaled_dot_product_attention(*[y[:, None]] * 3, is_causal=True)),
    "masked attention": of_text(
        lambda y: F.scaled_dot_product_attention(*[y[:, None]] * 3, attn_mask=torch.ones(48, 48, dtype=torch.bool))
    ),
    "encoder": (Of(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)), TEXT),
    "matrix exponential": of_text(lambda y: torch.matrix_exp(definite(y))),
    "singular values": of_text(torch.linalg.svdvals),
    "singular vectors": of_text(lambda y: torch.linalg.svd(y, full_matrices=False)[0]),
    "eigenvalues": of_text(lambda y: torch.linalg.eigvalsh(definite(y))),
    "Cholesky": of_text(lambda y: torch.linalg.cholesky(definite(y))),
    "inverse": of_text(lambda y: torch.linalg.inv(definite(y))),
    "solve": of_text(lambda y: torch.linalg.solve(definite(y), y[:, :32])),
    "QR": of_text(lambda y: torch.linalg.qr(y)[0]),
    "determinant": of_text(lambda y: torch.linalg.slogdet(definite(y))[1]),
    "cumulative sum": of_text(lambda y: y.cumsum(1)),
    "sort": of_text(lambda y: y.sort(1)[0]),
    "k-th": of_text(lambda y: y.kthvalue(3, 1)[0]),
    "largest": of_text(lambda y: y.topk(5)[0]),
    "maximum": of_text(lambda y: y.amax(1)),
    "median": of_text(lambda y: y.median(1)[0]),
    "deviation": of_text(lambda y: y.std(1)),
    "logsumexp": of_text(lambda y: y.logsumexp(1)),
    "logcumsumexp": of_text(lambda y: y.logcumsumexp(1)),
    "norm": of_text(torch.linalg.vector_norm),
    "distances": of_text(lambda y: torch.cdist(y, y)),
    "Fourier": of_text(lambda y: torch.fft.rfft2(y).abs()),
    "einsum": of_text(lambda y: torch.einsum("bij,bkj->bik", y, y)),
    "gather": of_text(lambda y: y.gather(1, picked(y))),
    "scatter": of_text(lambda y: torch.zeros_like(y).scatter(1, picked(y), y)),
    "index": of_text(lambda y: y[:, torch.arange(32)]),
    "roll": of_text(lambda y: y.roll(3, 1)),
    "windows": of_text(lambda y: y.unfold(1, 8, 4)),
    "where": of_text(lambda y: torch.where(y > 0, y, y * 0.1)),
    "Kronecker": of_text(lambda y: torch.kron(y[0, :8, :8], y[0])),
    "repeated": of_text(lambda y: y.repeat(2, 2, 1)),
    "normalised": of_text(lambda y: F.normalize(y)),
    "cosine": of_text(lambda y: F.cosine_similarity(y, y + 1, dim=1)),
    "reshaped": of_text(lambda y: y.mT.reshape(4, -1)),
    "mean of a dimension": of_text(lambda y: y.mean(1)),
}


@pytest.mark.sampled(every=36)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_the_traced_peak_is_the_allocators_or_the_ledger_names_what_is_missing(case: str, dtype: torch.dtype) -> None:
    module, shape = CASES[case]
    module, x = module.to(dtype), torch.randn(shape).to(dtype)

    def step() -> None:
        module(x).backward()
        module.zero_grad()

    try:
        step()
    except (RuntimeError, NotImplementedError):
        pytest.skip(f"torch does not compute it in {dtype} on a CPU")
    peak = storage_bytes([*module.parameters(), *module.buffers(), x]) + growth_at_peak(step)[0]
    ledger = count(module, x)
    assert ledger.unknown_scratch or ledger.peak_bytes == pytest.approx(peak, rel=0.01)


PRODUCTS = """
import json, sys
import torch
from napkin import count
from napkin.accounting import measured_scratch
from oracles.allocator import growth_at_peak

torch.set_num_threads(1)
found = []
for m, n, k in ((64, 64, 64), (256, 512, 384), (1024, 256, 256)):
    layer, x = torch.nn.Linear(k, n, bias=False).bfloat16(), torch.randn(m, k).bfloat16()
    with torch.no_grad():
        layer(x)
        product = growth_at_peak(lambda: layer(x))[0] - 2 * m * n

    def step(layer, x):
        layer(x).sum().backward()
        layer.zero_grad()

    step(layer, x)
    peak = 2 * (n * k + m * k) + growth_at_peak(lambda: step(layer, x))[0]
    found.append((product, peak, count(layer, x, step).peak_bytes))
print(json.dumps(found))
"""


def _in_a_process(tmp_path: Path, cap: str) -> list[tuple[int, int, int]]:
    paths = os.pathsep.join(path for path in (str(Path(__file__).parents[1]), *sys.path) if path)
    environment = {**os.environ, "PYTHONPATH": paths, "NAPKIN_CACHE_DIR": str(tmp_path), "ONEDNN_MAX_CPU_ISA": cap}
    ran = subprocess.run([sys.executable, "-c", PRODUCTS], env=environment, capture_output=True, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.torture
def test_products_in_bf16_take_what_the_processor_takes_whatever_its_instructions(tmp_path: Path) -> None:
    # All in one cache: what was measured with other instructions is not taken for this.
    of_each = {cap: _in_a_process(tmp_path, cap) for cap in ("AVX2", "AVX512_CORE", "AVX512_CORE_BF16", "DEFAULT")}
    for cap, found in of_each.items():
        for _, peak, counted in found:
            assert counted == pytest.approx(peak, rel=0.001), cap


def test_what_was_measured_is_kept_for_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAPKIN_CACHE_DIR", str(tmp_path))
    module, shape = CASES["unfold"]
    module, x = module.float(), torch.zeros(shape)
    monkeypatch.setattr(scratch, "_by_machine", {})
    peak = count(module, x).peak_bytes
    monkeypatch.setattr(scratch, "_by_machine", {})

    def unexpected(*_: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(scratch, "_measure", unexpected)
    assert count(module, x).peak_bytes == peak
    monkeypatch.setattr(scratch, "_by_machine", {})
    (kept,) = tmp_path.glob("scratch-*.json")
    kept.write_text("{ no JSON")
    with pytest.raises(AssertionError, match="measured again"):
        count(module, x)
