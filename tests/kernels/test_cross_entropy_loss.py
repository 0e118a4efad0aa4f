import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from napkin.hardware.device_file import catalogue
from napkin.kernels.loss.cross_entropy import cross_entropy, linear_cross_entropy, loss_chunk_size

N, D_MODEL, VOCAB_SIZE = 50, 16, 37


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight, and targets of which a fifth is ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D_MODEL, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(VOCAB_SIZE, D_MODEL, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(VOCAB_SIZE, (N,), generator=generator)
    targets[::5] = -1
    return hidden, weight, targets


def full_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, ignore_index=-1)


def test_cross_entropy_equals_torch_on_any_batch_shape() -> None:
    logits = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, 2, 3, -1], [6, -1, -1, 5, 4], [3, 3, 3, 3, 3]])
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    torch.testing.assert_close(cross_entropy(logits, targets), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("chunk_size", [1, 7, 25, 50, 1024])
def test_chunked_loss_and_gradients_equal_those_of_full_logits(chunk_size: int) -> None:
    hidden, weight, targets = problem()
    loss = linear_cross_entropy(hidden, weight, targets, chunk_size=chunk_size)
    expected = full_loss(hidden, weight, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(3 * loss, (hidden, weight)),
        torch.autograd.grad(3 * expected, (hidden, weight)),
        rtol=1e-5,
        atol=1e-6,
    )


def test_gradients_agree_with_finite_differences_in_float64() -> None:
    hidden, weight, targets = problem(torch.float64)
    gradients = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, chunk_size=16), (hidden, weight))
    generator = torch.Generator().manual_seed(1)
    ways = [torch.randn(g.shape, generator=generator, dtype=torch.float64) * 1e-5 for g in gradients]
    with torch.no_grad():
        ahead = linear_cross_entropy(hidden + ways[0], weight + ways[1], targets)
        behind = linear_cross_entropy(hidden - ways[0], weight - ways[1], targets)
    slope = torch.stack([(g * way).sum() for g, way in zip(gradients, ways, strict=True)]).sum()
    torch.testing.assert_close(slope, (ahead - behind) / 2, rtol=1e-6, atol=0)


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_a_frozen_side_takes_no_gradient_and_leaves_the_other_exact(trained: str) -> None:
    hidden, weight, targets = problem()
    frozen = weight if trained == "hidden" else hidden
    frozen.requires_grad_(False)
    linear_cross_entropy(hidden, weight, targets, chunk_size=16).backward()
    assert frozen.grad is None
    train_state = hidden if trained == "hidden" else weight
    (expected,) = torch.autograd.grad(full_loss(hidden, weight, targets), train_state)
    torch.testing.assert_close(train_state.grad, expected, rtol=1e-5, atol=1e-6)


def test_the_loss_is_the_same_number_with_and_without_gradients() -> None:
    hidden, weight, targets = problem()
    with torch.no_grad():
        without = linear_cross_entropy(hidden, weight, targets, chunk_size=16)
    assert not without.requires_grad
    assert torch.equal(without, linear_cross_entropy(hidden, weight, targets, chunk_size=16).detach())


def test_under_bf16_autocast_it_is_as_close_to_exact_as_full_bf16_logits() -> None:
    hidden, weight, targets = problem()
    exact = torch.autograd.grad(full_loss(hidden, weight, targets), (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        chunked_loss = linear_cross_entropy(hidden, weight, targets, chunk_size=16)
        bf16_loss = full_loss(hidden, weight, targets)
    assert chunked_loss.dtype == torch.float32
    torch.testing.assert_close(chunked_loss, bf16_loss, rtol=1e-3, atol=0)
    for actual, rival, expected in zip(
        torch.autograd.grad(chunked_loss, (hidden, weight)),
        torch.autograd.grad(bf16_loss, (hidden, weight)),
        exact,
        strict=True,
    ):
        assert actual.dtype == torch.float32
        error, rival_error = (actual - expected).norm(), (rival - expected).norm()
        # 2^-8 is bf16's resolution; the rival shows what rounding inputs and logits costs by itself.
        assert error < max(1.5 * rival_error.item(), 2**-8 * expected.norm().item())
        assert error > 0, "the products were not taken in bf16"


def test_autocast_for_the_whole_backward_pass_changes_nothing() -> None:
    hidden, weight, targets = problem()
    results = []
    for inside in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            loss = linear_cross_entropy(hidden, weight, targets, chunk_size=16)
            if inside:
                results.append(torch.autograd.grad(loss, (hidden, weight)))
        if not inside:
            results.append(torch.autograd.grad(loss, (hidden, weight)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_where_every_target_is_ignored_loss_and_gradients_are_zero() -> None:
    hidden, weight, targets = problem()
    nothing = torch.full_like(targets, -1)
    loss = linear_cross_entropy(hidden, weight, nothing)
    loss.backward()
    assert loss.item() == cross_entropy(F.linear(hidden, weight), nothing).item() == 0
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.count_nonzero() == weight.grad.count_nonzero() == 0


def test_an_impossible_target_has_a_large_finite_loss() -> None:
    # exp(-1000) is 0 in fp32: a loss taken as -log(softmax) would be infinite.
    hidden, weight = torch.tensor([[1000.0]]), torch.tensor([[0.0], [1.0]])
    assert linear_cross_entropy(hidden, weight, torch.tensor([0])).item() == 1000
    assert cross_entropy(hidden @ weight.T, torch.tensor([0])).item() == 1000


def test_logits_that_all_agree_lose_the_logarithm_of_the_vocabulary() -> None:
    loss = linear_cross_entropy(torch.zeros(4, 8), torch.ones(1000, 8), torch.arange(4))
    assert loss.item() == pytest.approx(math.log(1000), rel=1e-6)


def test_a_second_backward_pass_is_refused_and_never_silently_wrong() -> None:
    hidden, weight, targets = problem()
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"modified.*operation"):
        loss.backward()


def test_gradients_of_micro_batches_add_up_in_grad() -> None:
    hidden, weight, targets = problem()
    half = N // 2
    for rows in (slice(half), slice(half, None)):
        count = (targets[rows] != -1).sum() / (targets != -1).sum()
        (count * linear_cross_entropy(hidden[rows], weight, targets[rows])).backward()
    expected = torch.autograd.grad(full_loss(hidden, weight, targets), (hidden, weight))
    torch.testing.assert_close((hidden.grad, weight.grad), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("vocab_size", [512, 50257, 128256, 262144])
@pytest.mark.parametrize("memory_bytes", [6e9, 25.3e9, 85.5e9, 288e9])
def test_a_gpus_chunk_is_the_largest_power_of_two_whose_logits_are_a_small_part_of_its_memory(
    vocab_size: int, memory_bytes: float
) -> None:
    suitable = [size for size in (512, 1024, 2048, 4096, 8192) if 16 * 8 * size * vocab_size <= memory_bytes]
    assert loss_chunk_size(vocab_size, memory_bytes) == max(suitable, default=512)


def test_a_cpus_chunk_stays_small() -> None:
    assert loss_chunk_size(50257, None) == 512


def test_moving_the_heads_weight_and_gradient_takes_an_eighth_of_its_products_on_every_gpu() -> None:
    devices = [device for device in catalogue() if device.vendor in ("NVIDIA", "AMD") and "bf16" in device.peaks]
    assert len(devices) > 20
    for device in devices:
        # A chunk moves 12 bytes per number of the weight, and its products compute 6 FLOPs per number and row.
        moving, computing = 12 / device.memory_bandwidth, 6 * 8192 / device.peaks["bf16"]
        assert moving < computing / 8, device.name
