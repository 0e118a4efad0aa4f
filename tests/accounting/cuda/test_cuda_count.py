import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from napkin import Ledger, count
from napkin.accounting.cuda.caching_allocator import rounded
from napkin.accounting.cuda.trace import _FP32, _FP32_UNLESS_TOLD, as_on_cuda
from napkin.accounting.recording import record
from napkin.errors import NapkinError
from napkin.hardware.target import CudaTarget, cuda_target
from napkin.kernels import fused_linear_cross_entropy, linear_cross_entropy
from oracles.brute_force_flops import ScalarProducts
from oracles.torch_models import GPT2, Llama

A100, H100 = CudaTarget((8, 0)), CudaTarget((9, 0))
MIB = 2**20


def _tokens(batch_size: int = 2, length: int = 8) -> tuple[Tensor, Tensor]:
    tokens = torch.zeros(batch_size, length, dtype=torch.int64)
    return tokens, tokens.clone()


def _operators(ledger: Ledger) -> set[str]:
    return {row.operator for row in ledger.rows}


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("target", [A100, H100], ids=["flash", "cudnn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_flops_equal_the_multiplications_and_additions_done_one_by_one(
    dtype: torch.dtype, target: CudaTarget, checkpointing: bool
):
    def model() -> nn.Module:
        if dtype == torch.bfloat16:
            return Llama(11, 6, 1, 16, 2, 1, 12, checkpointing=checkpointing)
        return GPT2(11, 6, 1, 16, 2, checkpointing=checkpointing)

    tokens = _tokens(2, 6)
    torch.set_default_dtype(dtype)
    # Stopped early, checkpointing leaves out the last product, which the oracle does.
    with set_checkpoint_early_stop(False):
        counted = count(model(), tokens, target=target)
    torch.set_default_dtype(torch.float32)
    form = "efficient" if dtype == torch.float32 else "flash" if target is A100 else "cudnn"
    assert f"_scaled_dot_product_{form}_attention_backward" in _operators(counted)

    module = model()
    plain, causal = ScalarProducts(), ScalarProducts(skip_masked=True)
    for oracle in (plain, causal):
        with oracle, set_checkpoint_early_stop(False):
            torch.autograd.backward(module(*tokens))
    again = [row for row in counted.rows if row.phase == "recompute"]
    assert counted.flops + sum(row.flops for row in again) == plain.flops
    assert counted.causal_flops + sum(row.causal_flops for row in again) == causal.flops


@pytest.mark.parametrize("target", ["cuda", A100])
def test_what_is_alive_at_the_peak_adds_up_in_blocks_and_is_reserved(target: CudaTarget):
    ledger = count(GPT2(97, 16, 2, 32, 2), _tokens(2, 16), optimizer=torch.optim.AdamW, target=target)
    assert ledger.reserved_bytes is not None
    assert sum(ledger.peak_by_category.values()) == ledger.peak_bytes <= ledger.reserved_bytes
    assert ledger.reserved_bytes % (2 * MIB) == ledger.peak_bytes % 512 == 0
    assert max(moment.bytes_alive for moment in ledger.timeline) == ledger.peak_bytes
    parameters = GPT2(97, 16, 2, 32, 2).parameters()
    assert ledger.peak_by_category["parameters"] == sum(rounded(parameter.nbytes) for parameter in parameters)
    assert count(GPT2(97, 16, 2, 32, 2), _tokens(2, 16)).reserved_bytes is None


def test_a_linear_layers_step_by_hand():
    layer = nn.Linear(1024, 2048, bias=False)
    weight = gradient = 8 * MIB
    ledger = count(layer, torch.zeros(256, 1024), target=A100)
    # A workspace for the thread that goes forward; backward there is one product, in a thread of autograd's own.
    workspaces = 2 * 8_519_680
    x, y, loss_and_its_gradient = MIB, 2 * MIB, 2 * 512
    assert ledger.resident_bytes == weight + x + workspaces
    # At the peak there are the output, which its caller holds, its gradient and the weight's.
    assert ledger.peak_bytes == weight + x + workspaces + loss_and_its_gradient + 2 * y + gradient
    # 20: weight, workspace, y; 20: y's gradient, the weight's, the other workspace; 2: x and the loss.
    assert ledger.reserved_bytes == 42 * MIB
    assert count(layer, torch.zeros(256, 1024), target=H100).resident_bytes == weight + x + 2 * 32 * MIB


def test_scratch_of_cpu_kernels_is_not_counted_for_a_gpu():
    class Promotes(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.float() * input)

    ledgers = [count(Promotes(256, 4), torch.zeros(512, 256, dtype=torch.bfloat16), target=t) for t in ("cpu", A100)]
    on_cpu, on_gpu = (next(row for row in ledger.rows if row.operator == "mul") for ledger in ledgers)
    assert on_gpu.bytes_allocated == 4 * 512 * 256
    assert on_cpu.bytes_allocated == on_gpu.bytes_allocated + 4 * 512 * 256


def test_dropout_keeps_a_byte_a_number_and_normalisation_is_one_operator():
    class Block(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(16, 16), nn.RMSNorm(16), nn.Dropout(0.1))

    ledger = count(Block(), torch.zeros(4, 16), target=A100)
    kept = {row.operator: row.bytes_kept for row in ledger.rows}
    # A factor a row; a byte per number beside the result, which its caller holds.
    assert kept["_fused_rms_norm"] == 4 * 4
    assert kept["native_dropout"] - 4 * (4 * 16) == 4 * 16
    assert {"_fused_rms_norm_backward", "native_dropout_backward"} <= _operators(ledger)
    assert {"pow", "bernoulli_"} <= _operators(count(Block(), torch.zeros(4, 16)))
    assert "native_dropout" not in _operators(count(Block().eval(), torch.zeros(4, 16), target=A100))


class Mixed(nn.Module):
    """What autocast treats in its own way on CUDA, in the order that a language model has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.layer(x)
        normed = self.norm(y)
        return {
            "layer": y,
            "norm": normed,
            "softmax": y.softmax(-1),
            "bf16 softmax": y.softmax(-1, dtype=torch.bfloat16),
            "positional": torch.softmax(y, -1, torch.bfloat16),
            "sum": y.sum(),
            "power": y.pow(2),
            "loss": F.cross_entropy(y, torch.zeros(len(y), dtype=torch.int64)),
            "double": y.double().exp(),
            "again": self.layer(normed),
        }


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_autocast_is_cudas_whichever_device_the_step_names(device_type: str):
    seen: list[dict[str, torch.dtype]] = []

    def step(module: nn.Module, x: Tensor) -> None:
        with torch.autocast(device_type, torch.bfloat16):
            outputs = module(x)
        seen.append({name: value.dtype for name, value in outputs.items()})
        outputs["loss"].backward()

    count(Mixed(), torch.zeros(4, 16), step, target=A100)
    halves = {"layer", "bf16 softmax", "positional", "again"}
    assert seen[0] == {
        name: torch.bfloat16 if name in halves else torch.float64 if name == "double" else torch.float32
        for name in seen[0]
    }


def test_what_runs_in_fp32_is_what_torch_registers_for_cudas_autocast_alone():
    on_cuda, on_cpu = (
        set(torch._C._dispatch_get_registrations_for_dispatch_key(key)) for key in ("AutocastCUDA", "AutocastCPU")
    )
    ours = {f"aten::{name}" for name in _FP32 + _FP32_UNLESS_TOLD}
    assert ours <= on_cuda - on_cpu
    # Left: half precision, the widest of several formats, vision's.
    for name in on_cuda - on_cpu - ours:
        kinds = ("conv", "cell", "upsample", "linalg_multi_dot", "chain", "flash", "einsum", "mv", "addr", "dot")
        widest = ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "index_put", "scatter_add", "vdot")
        assert any(kind in name for kind in kinds + widest), name


def test_fp32_autocast_widens_what_a_layer_norm_keeps():
    def step(module: nn.Module, x: Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            module(x).sum().backward()

    ledger = count(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)), torch.zeros(4, 16), step, target=A100)
    (norm,) = (row for row in ledger.rows if row.operator == "native_layer_norm")
    assert (norm.format, norm.bytes_allocated) == ("fp32", 4 * (4 * 16 + 2 * 4))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_optimizers_and_clipping_take_the_foreach_form_by_themselves(optimizer: Callable[..., torch.optim.Optimizer]):
    with FakeTensorMode():
        module = nn.Linear(64, 64)
        update = optimizer(module.parameters())

        def step(module: nn.Module, x: Tensor) -> None:
            module(x).sum().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            update.step()
            update.zero_grad()

        by_itself, on_cpu = (count(module, torch.zeros(4, 64), step, target=target) for target in (A100, "cpu"))
    updates = {row.operator for row in by_itself.rows if row.phase == "optimizer"}
    assert {"_foreach_norm", "_foreach_mul_"} <= updates
    assert not {"mul_", "addcdiv_", "add_"} & updates
    assert {"mul_", "add_"} & _operators(on_cpu)


def test_step_counts_are_in_the_hosts_memory_unless_the_update_is_fused():
    module = nn.Linear(64, 64)
    for fused, steps in ((False, 0), (True, 2 * 512)):
        adamw = partial(torch.optim.AdamW, fused=fused)
        ledger = count(module, torch.zeros(4, 64), optimizer=adamw, target=A100)
        assert ledger.peak_by_category["optimizer state"] == 2 * (4 * 64 * 64 + 512) + steps


def test_a_checkpointed_block_is_computed_again_in_the_same_form():
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Linear(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False)  # pyright: ignore[reportReturnType]

    ledger = count(Checkpointed(), torch.zeros(4, 16), target=A100)
    assert "native_dropout" in {row.operator for row in ledger.rows if row.phase == "recompute"}


def test_other_threads_and_what_comes_after_compute_as_ever():
    query = torch.randn(2, 4, 8, 16)
    before = F.scaled_dot_product_attention(query, query, query)
    found: list[Tensor] = []

    def attend() -> None:
        found.append(F.scaled_dot_product_attention(query, query, query))
        with torch.autocast("cpu", torch.bfloat16):
            found.append(torch.ones(4, dtype=torch.bfloat16).softmax(-1))

    with as_on_cuda(A100):
        thread = threading.Thread(target=attend)
        thread.start()
        thread.join()
    attend()
    assert len(found) == 4
    assert all(torch.equal(mixed, before) for mixed in found[::2])
    assert {weights.dtype for weights in found[1::2]} == {torch.bfloat16}
    on_cpu = count(nn.Linear(4, 4), torch.zeros(1, 4), optimizer=torch.optim.AdamW)
    assert not any("foreach" in operator for operator in _operators(on_cpu))
    assert torch.autocast.__init__.__qualname__ == "autocast.__init__"


def test_steps_are_counted_for_gpus_in_several_threads():
    ledgers: dict[CudaTarget, Ledger] = {}

    def run(target: CudaTarget) -> None:
        ledgers[target] = count(GPT2(11, 8, 1, 16, 2), _tokens(), target=target)

    threads = [threading.Thread(target=run, args=(target,)) for target in (A100, H100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {
        target: ledger == count(GPT2(11, 8, 1, 16, 2), _tokens(), target=target) for target, ledger in ledgers.items()
    } == {
        A100: True,
        H100: True,
    }


def test_a_call_that_no_kernel_takes_is_refused_on_one_line():
    def step(module: nn.Module, x: Tensor) -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            module(x, x).backward()

    with pytest.raises(NapkinError, match="no enabled backend supports") as refusal:
        count(GPT2(11, 8, 1, 16, 2), torch.zeros(2, 8, dtype=torch.int64), step, target=A100)
    assert "\n" not in str(refusal.value)


def test_an_embeddings_gradient_takes_scratch_for_many_tokens_alone():
    module = nn.Embedding(50, 32)
    for tokens, scratch in ((3072, 0), (4000, 3 * 8 * 4000 + 2 * 8 * 50 + (8 + 4 * 32) * (400 + 50))):
        ledger = count(module, torch.zeros(tokens, dtype=torch.int64), target=A100)
        (backward,) = (row for row in ledger.rows if row.operator == "embedding_dense_backward")
        assert backward.bytes_allocated == 4 * 50 * 32 + scratch


@pytest.mark.parametrize("target", [A100, H100])
def test_a_second_step_of_warming_up_reserves_no_more(target: CudaTarget):
    with FakeTensorMode(), as_on_cuda(target):
        module = GPT2(997, 64, 2, 128, 2)
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        tokens = _tokens(4, 64)

        def step() -> None:
            module(*tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        once, thrice = (record(module, step, warm_up=n, cuda=target) for n in (1, 3))
    assert once.peak_bytes == pytest.approx(thrice.peak_bytes, rel=0.02)
    assert once.reserved_bytes == pytest.approx(thrice.reserved_bytes, rel=0.05)


def test_targets_are_named_or_described():
    assert cuda_target("cpu") is None
    assert cuda_target(A100) is A100
    assert isinstance(cuda_target("cuda"), CudaTarget)
    assert replace(A100, capability=(12, 0)).workspace_bytes == 32 * MIB


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_adafactor_is_counted_and_what_needs_a_closure_refused(target: str):
    module = nn.Linear(8, 4)
    ledger = count(module, torch.zeros(2, 8), optimizer=torch.optim.Adafactor, target=target)  # pyright: ignore
    assert ledger.peak_by_category["optimizer state"] > 0
    assert not ledger.unknown_operators
    with pytest.raises(NapkinError, match=r"LBFGS evaluates.*inside") as refusal:
        count(module, torch.zeros(2, 8), optimizer=torch.optim.LBFGS, target=target)  # pyright: ignore
    assert "\n" not in str(refusal.value)


class Head(nn.Module):
    """A vocabulary of 1000, rows of 64 numbers, the loss in chunks."""

    def __init__(self, loss: Callable[..., Tensor], chunk_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1000, 64))
        self.loss = partial(loss, chunk_size=chunk_size)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.loss(hidden.requires_grad_(), self.weight, targets)


@pytest.mark.parametrize("loss", [linear_cross_entropy, fused_linear_cross_entropy])
def test_a_gpu_adds_the_heads_gradient_up_in_its_place(loss: Callable[..., Tensor]):
    batch = torch.randn(2048, 64), torch.zeros(2048, dtype=torch.int64)
    few, many = (count(Head(loss, size), batch, target=H100) for size in (1024, 256))
    for ledger, size, n_chunks in ((few, 1024, 2), (many, 256, 8)):
        added = [row for row in ledger.rows if row.operator == "addmm"]
        # Products of the logits in bf16 with rows in bf16, added to the gradient in fp32.
        expected = (4 * 1000 * 64 + 2 * size * (1000 + 64), 4 * 1000 * 64, 0, "bf16", (1, 1000, 64, size))
        found = {(row.bytes_read, row.bytes_written, row.bytes_allocated, row.format, row.contraction) for row in added}
        assert (len(added), found) == (n_chunks, {expected})
    # Each chunk more reads the weight twice, and reads and writes the gradient; the rest is rows and single numbers.
    moved = [sum(row.bytes_read + row.bytes_written for row in ledger.rows) for ledger in (few, many)]
    assert 6 * 12 * 64_000 <= moved[1] - moved[0] <= 6 * 12 * 64_000 * 1.05
    # Nothing beside logits grows with a chunk.
    assert 0 < few.peak_bytes - many.peak_bytes <= 768 * 1000 * 8


def test_a_cpu_has_a_product_of_each_chunk_beside_the_gradient():
    batch = torch.randn(2048, 64), torch.zeros(2048, dtype=torch.int64)
    rows = count(Head(linear_cross_entropy, 256), batch).rows
    # With what the product packs on a processor that has products in bf16.
    assert sum(row.contraction == (1, 1000, 64, 256) and row.bytes_allocated >= 128_000 for row in rows) == 8
