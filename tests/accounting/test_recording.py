from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from napkin import Ledger, count
from napkin.accounting.recording import record
from oracles.tiny_models import OwnLinear
from oracles.torch_models import GPT2, Llama


def _flops(ledger: Ledger, phase: str) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for row in ledger.rows:
        if row.phase == phase and row.flops:
            sums[row.module] += row.flops
    return dict(sums)


def _tokens() -> tuple[Tensor, Tensor]:
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    return tokens, tokens.clone()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_each_modules_backward_pass_is_found_to_be_twice_its_forward_pass(checkpointing: bool):
    model = Llama(11, 6, 2, 8, 2, 1, 12, checkpointing=checkpointing)
    ledger = count(model, _tokens())
    positions = 2 * 6
    forward = {
        name: 2 * positions * layer.weight.numel()
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    }
    # A block itself attends: 2 heads of 4 numbers, 6 × 6 pairs, two products.
    forward |= {f"blocks.{i}": 2 * 2 * 2 * (2 * 4 * 36) for i in range(2)}
    assert _flops(ledger, "forward") == forward
    assert _flops(ledger, "backward") == {name: 2 * flops for name, flops in forward.items()}


def test_checkpointed_modules_are_computed_again_and_only_hardware_flops_show_it():
    plain, again = (count(GPT2(11, 6, 2, 8, 2, checkpointing=form), _tokens()) for form in (False, True))
    with set_checkpoint_early_stop(False):
        whole = count(GPT2(11, 6, 2, 8, 2, checkpointing=True), _tokens())
    blocks = {name: flops for name, flops in _flops(plain, "forward").items() if name.startswith("blocks")}
    assert _flops(whole, "recompute") == blocks
    # Stopped early, all but the last product, whose result is not needed.
    assert _flops(again, "recompute") == {name: n for name, n in blocks.items() if not name.endswith("down")}
    assert plain.flops == again.flops == whole.flops
    assert whole.hardware_flops == plain.hardware_flops + sum(blocks.values())
    assert again.kept_bytes < plain.kept_bytes


def test_a_checkpointed_function_is_computed_again_too():
    layer = nn.Linear(4, 4)

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = layer.weight

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda x: (x @ self.weight).tanh(), x, use_reentrant=False)  # pyright: ignore[reportReturnType]

    ledger = count(Functional(), torch.ones(3, 4))
    assert _flops(ledger, "recompute") == _flops(ledger, "forward") == {"": 2 * 3 * 4 * 4}


def test_second_derivatives_belong_to_the_backward_pass():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 1, bias=False))

    def step(module: nn.Module, x: Tensor) -> None:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        module.zero_grad()

    ledger = count(model, torch.ones(3, 4), step)
    assert not _flops(ledger, "recompute")
    assert ledger.flops == ledger.forward_flops + ledger.backward_flops
    assert ledger.forward_flops == 2 * 3 * (16 + 4)


def test_rows_of_an_own_function_carry_its_modules_path_in_both_passes():
    ledger = count(nn.Sequential(nn.Linear(4, 4), OwnLinear(4, 3)), torch.ones(5, 4))
    one = 2 * 5 * 4 * 3
    assert _flops(ledger, "forward")["1"] == one
    assert _flops(ledger, "backward")["1"] == 2 * one


def test_clipping_and_update_are_the_optimizers_also_after_gradients_are_accumulated():
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        total = torch.zeros(())
        for part in torch.ones(4, 8).split(2):
            loss = model(part).square().mean()
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    ledger = record(model, step, warm_up=1)
    phases = {row.operator: row.phase for row in ledger.rows}
    assert phases["linalg_vector_norm"] == phases["lerp_"] == phases["addcdiv_"] == "optimizer"
    order = [row.phase for row in ledger.rows if row.flops]
    assert order == ["forward", "backward", "forward", "backward"]


def test_kept_bytes_are_the_tensors_saved_for_the_backward_pass():
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    model = GPT2(11, 6, 2, 8, 2)
    batch = _tokens()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*batch)
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *batch)}
    ledger = record(model, lambda: model(*batch).backward())
    # And the loss, which its caller holds, with the first gradient, 1.
    assert ledger.kept_bytes - loss.nbytes == pytest.approx(
        sum(size for storage, size in saved.items() if storage not in own), abs=2 * loss.nbytes
    )


def test_the_timeline_starts_and_ends_at_what_is_resident_and_reaches_the_peak():
    model = GPT2(11, 6, 1, 8, 2)
    ledger = count(model, _tokens(), optimizer=lambda p: torch.optim.AdamW(p, fused=True))
    levels = [moment.bytes_alive for moment in ledger.timeline]
    assert max(levels) == ledger.peak_bytes
    assert min(levels) >= ledger.resident_bytes
    assert [moment.row for moment in ledger.timeline] == sorted({moment.row for moment in ledger.timeline})


def test_gradients_that_stay_from_step_to_step_are_resident():
    model = nn.Linear(64, 64, bias=False)

    def step() -> None:
        model(torch.ones(1, 64)).sum().backward()

    ledger = record(model, step, warm_up=1)
    assert ledger.peak_by_category["gradients"] == 4 * 64 * 64
    assert ledger.resident_bytes >= 2 * 4 * 64 * 64


@pytest.mark.parametrize(
    ("call", "read", "written"),
    [
        (lambda a, b: a @ b, 8 * 4 * 4 + 4 * 8 * 4, 8 * 8 * 4),
        (lambda a, b: a.t(), 0, 0),
        (lambda a, b: a.add_(1), 8 * 4 * 4, 8 * 4 * 4),
        (lambda a, b: torch.ops.aten._foreach_add_([a, b], 1), 2 * 8 * 4 * 4, 2 * 8 * 4 * 4),
        (lambda a, b: a.to(torch.bfloat16), 8 * 4 * 4, 8 * 4 * 2),
    ],
    ids=["product", "view", "in place", "foreach", "cast"],
)
def test_bytes_read_and_written_are_those_of_operands_and_results(call: Callable[..., Any], read: int, written: int):
    a, b = torch.ones(8, 4), torch.ones(4, 8)
    ledger = record(nn.Module(), lambda: call(a, b))
    assert [(row.bytes_read, row.bytes_written) for row in ledger.rows][-1] == (read, written)


def test_hooks_are_gone_when_a_step_fails():
    model = nn.Linear(4, 4)

    def step() -> None:
        model(torch.ones(1, 4))
        raise KeyError("own")

    with pytest.raises(KeyError):
        record(model, step)
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not _global_optimizer_pre_hooks
