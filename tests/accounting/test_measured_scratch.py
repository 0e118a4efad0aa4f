"""What a CPU library's kernels take while they run is part of the peak: measured where no formula tells it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin import count
from napkin.accounting import scratch
from napkin.accounting.memory import allocator_events

aten = torch.ops.aten


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """Nothing has been measured, in this process or before."""

    def forget() -> None:
        monkeypatch.setattr(scratch, "_by_machine", {})
        monkeypatch.setenv("NAPKIN_CACHE_DIR", str(tmp_path / str(len(list(tmp_path.iterdir())))))

    forget()
    return forget


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    return lambda work: monkeypatch.setattr(scratch, "MOST_WORK", work)


class Returns(nn.Module):
    """The sum of the first result of a function of a layer's output."""

    def __init__(self, layer: nn.Module, act: Callable[[Tensor], Tensor] = lambda y: y) -> None:
        super().__init__()
        self.layer, self.act = layer, act

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.act(y[0] if isinstance(y, tuple) else y).sum()


def filtered(y: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(y, dim=1) * 2, dim=1).square()


CASES = {
    "convolution": (nn.Conv2d(32, 32, 3, padding=1), (4, 32, 32, 32)),
    "strided": (nn.Conv2d(16, 32, 3, stride=2), (4, 16, 33, 33)),
    "one dimension": (nn.Conv1d(32, 32, 5), (4, 32, 256)),
    "transposed": (nn.ConvTranspose2d(16, 16, 4, stride=2), (2, 16, 32, 32)),
    "depthwise": (nn.Conv2d(32, 32, 3, groups=32), (4, 32, 32, 32)),
    "narrow": (nn.Conv2d(32, 32, 3, padding=1).bfloat16(), (4, 32, 32, 32)),
    "LSTM": (nn.LSTM(64, 64, 2, batch_first=True), (8, 24, 64)),
    "long LSTM": (nn.LSTM(64, 64, batch_first=True), (8, 100, 64)),
    "GRU": (nn.GRU(32, 32), (5, 8, 32)),
}


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("case", CASES)
def test_the_peak_of_layers_with_hidden_scratch_is_that_of_a_run(case: str) -> None:
    layer, shape = CASES[case]
    x = torch.randn(shape, dtype=next(layer.parameters()).dtype)
    traced, ran = (count(Returns(layer), x, by=by) for by in ("tracing", "running"))
    assert traced.peak_bytes == pytest.approx(ran.peak_bytes, rel=0.01)
    assert traced.flops == ran.flops
    assert not traced.unknown_scratch
    assert not ran.unknown_scratch


def test_the_peak_of_a_fourier_transform_is_that_of_a_run() -> None:
    module, x = Returns(nn.Linear(64, 64), filtered), torch.randn(8, 128, 64)
    traced, ran = (count(module, x, by=by).peak_bytes for by in ("tracing", "running"))
    assert traced == pytest.approx(ran, rel=0.001)


def test_a_call_that_takes_too_long_is_run_on_fewer_rows(
    forget: Callable[[], None], limit: Callable[[float], None]
) -> None:
    layer, x = nn.Conv2d(32, 32, 3, padding=1), torch.randn(16, 32, 16, 16)
    in_full = count(Returns(layer), x)
    forget()
    limit(2 * 3 * 3 * 32 * 32 * 16 * 16 * 5)
    on_fewer = count(Returns(layer), x)
    assert on_fewer.peak_bytes == pytest.approx(in_full.peak_bytes, rel=0.02)
    assert not on_fewer.unknown_scratch


@pytest.mark.usefixtures("forget")
def test_an_operator_whose_scratch_cannot_be_measured_is_named(limit: Callable[[float], None]) -> None:
    limit(1)
    ledger = count(Returns(nn.Conv2d(4, 4, 3)), torch.randn(2, 4, 8, 8))
    assert {"convolution", "convolution_backward"} <= set(ledger.unknown_scratch)
    assert "unknown scratch" in repr(ledger)


@pytest.mark.usefixtures("forget")
def test_measuring_scratch_leaves_the_random_state_alone() -> None:
    module, x = Returns(nn.Conv2d(4, 4, 3)), torch.zeros(2, 4, 8, 8)
    before = torch.get_rng_state()
    count(module, x)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("forget")
@pytest.mark.parametrize(
    ("rows", "inner", "columns"),
    [pytest.param(1, 2**17, 2**20, id="a large weight"), pytest.param(2**20, 1, 2**20, id="a large result")],
)
def test_a_call_that_does_not_fit_is_not_run(rows: int, inner: int, columns: int) -> None:
    with FakeTensorMode():
        left = torch.empty(rows, inner, dtype=torch.bfloat16)
        right = torch.empty(inner, columns, dtype=torch.bfloat16)
        product = left @ right
    flops = 2 * rows * inner * columns
    with allocator_events() as growth:
        found = scratch.measured_scratch(aten.mm.default, (left, right), {}, [left, right], [product], flops)
    assert found is None
    assert not growth or growth[0] <= scratch.MOST_BYTES


def test_fewer_rows_of_a_transposed_matrix_lie_as_the_whole_one_does() -> None:
    mode = FakeTensorMode()
    with mode:
        whole = torch.empty(512, 16_777_216, dtype=torch.bfloat16).T
        padded = torch.empty(16, 1_000_064, dtype=torch.bfloat16)[:, :1_000_000].T
    assert scratch._first_rows(whole, 1216).stride() == (1, 1216)
    assert scratch._bytes(scratch._first_rows(whole, 1216)) == 1216 * 512 * 2
    # Columns that are aligned to 64 elements stay so.
    assert scratch._first_rows(padded, 1000).stride() == (1, 1024)
    assert scratch._first_rows(padded, 1000).shape == (1000, 16)
