import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin import Ledger, count
from napkin.accounting.metering import meter_step
from napkin.errors import NapkinError
from oracles.torch_models import GPT2


class Classifier(nn.Module):
    """Two layers over x; `form` makes what it returns of the logits and their loss."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any] = lambda logits, loss: loss) -> None:
        super().__init__()
        self.form = form
        self.norm = nn.BatchNorm1d(8)
        self.hidden, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, *, scale: float = 1.0, more: Tensor | None = None) -> Any:
        x = x if more is None else x + more
        logits = self.head(nn.functional.dropout(self.hidden(self.norm(x)), 0.1)) * scale
        return self.form(logits, logits.square().mean())


@dataclass
class ModelOutput:
    logits: Tensor
    hidden: tuple[Tensor, ...]


class Refuses(nn.Module):
    """Does something to its input that fake tensors cannot follow."""

    def __init__(self, act: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.act = act
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.act(x)
        return self.layer(x)


@torch.library.custom_op("napkin_tests::embedding", mutates_args=())
def own_operator(x: Tensor) -> Tensor:
    return x @ x.T


@own_operator.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[0])


X = torch.ones(5, 8)


def test_real_meta_and_fake_modules_have_the_same_ledger():
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    batch = (tokens, tokens.clone())
    with torch.device("meta"):
        meta = GPT2(11, 4, 1, 8, 2)
    with FakeTensorMode():
        fake = GPT2(11, 4, 1, 8, 2)
    real = count(GPT2(11, 4, 1, 8, 2), batch, optimizer=torch.optim.AdamW)
    assert real == count(meta, batch, optimizer=torch.optim.AdamW)
    assert real == count(fake, batch, optimizer=torch.optim.AdamW)
    assert real == count(meta, tuple(tensor.to("meta") for tensor in batch), optimizer=torch.optim.AdamW)


def test_a_tensor_a_tuple_and_a_dict_are_batches():
    one = count(Classifier(), X)
    assert (
        one == count(Classifier(), (X,)) == count(Classifier(), {"x": X}) == count(Classifier(), {"x": X, "scale": 1.0})
    )
    two = count(Classifier(), {"x": X, "more": torch.ones(5, 8)})
    assert [row.operator for row in two.rows[:1]] == ["add"]
    assert two.flops == one.flops


@pytest.mark.parametrize(
    "form",
    [
        lambda logits, loss: {"loss": loss, "logits": logits},
        lambda logits, loss: SimpleNamespace(logits=logits, loss=loss),
        lambda logits, loss: (loss, logits),
        lambda logits, loss: logits,
        lambda logits, loss: [logits, {"more": logits}],
        lambda logits, loss: {"loss": None, "logits": logits},
        lambda logits, loss: ModelOutput(logits, (logits,)),
    ],
    ids=["mapping", "object", "tuple", "logits", "nested", "no loss", "dataclass"],
)
def test_whatever_a_model_returns_its_backward_pass_is_counted(form: Callable[[Tensor, Tensor], Any]):
    # The input needs no gradient, but batch normalisation's weight comes before the first layer.
    assert (
        count(Classifier(form), X).backward_flops == 2 * count(Classifier(form), X).forward_flops == 2 * 2 * 5 * 8 * 12
    )


def test_the_module_is_left_untouched():
    module = Classifier()
    module.hidden.weight.requires_grad_(False)
    module.head.eval()
    module.head.weight.grad = torch.ones(4, 8)
    calls: list[str] = []
    module.head.register_forward_hook(lambda *_: calls.append("hook"))
    before, gradient = copy.deepcopy(module.state_dict()), module.head.weight.grad
    hooks = len(module.head._forward_hooks)
    random_state = torch.get_rng_state()

    count(module, X, optimizer=torch.optim.AdamW)

    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(type(value) is Tensor for value in module.state_dict().values())
    assert module.head.weight.grad is gradient
    assert torch.equal(gradient, torch.ones(4, 8))
    assert module.hidden.weight.grad is None
    assert [parameter.requires_grad for parameter in module.hidden.parameters()] == [False, True]
    assert (module.training, module.head.training) == (True, False)
    assert len(module.head._forward_hooks) == hooks
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not torch.nn.modules.module._global_forward_hooks


def test_counting_twice_is_the_same():
    module = Classifier()
    assert count(module, X, optimizer=torch.optim.AdamW) == count(module, X, optimizer=torch.optim.AdamW)


def test_tied_parameters_and_parameters_over_one_storage_take_their_bytes_once():
    first, second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    module = nn.Sequential(first, second)
    apart = count(module, torch.ones(1, 64)).resident_bytes

    second.weight = nn.Parameter(first.weight.detach())
    shared = count(module, torch.ones(1, 64))
    assert shared.resident_bytes == apart - 64 * 64 * 4
    assert shared.parameters == 2 * 64 * 64

    second.weight = first.weight
    tied = count(module, torch.ones(1, 64))
    assert tied.resident_bytes == apart - 64 * 64 * 4
    assert tied.parameters == 64 * 64


def test_the_second_step_is_counted_in_which_the_optimizers_state_is_there_from_the_start():
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    ledger = count(GPT2(11, 4, 1, 8, 2), (tokens, tokens), optimizer=lambda p: torch.optim.AdamW(p, fused=True))
    moments = 2 * 4 * ledger.parameters
    steps = 4 * len(list(GPT2(11, 4, 1, 8, 2).parameters()))
    assert ledger.resident_bytes == 4 * ledger.parameters + moments + steps + tokens.nbytes
    assert ledger.peak_by_category["optimizer state"] == moments + steps
    assert ledger.peak_by_category["parameters"] == 4 * ledger.parameters


def test_an_own_step_is_what_is_counted():
    def accumulate(module: nn.Module, batch: Tensor) -> None:
        for part in batch.split(1):
            module(part).square().mean().backward()
        module.zero_grad()

    layer = nn.Linear(8, 4)
    ledger = count(layer, X, accumulate)
    assert ledger.flops == count(layer, X).flops
    assert sum(row.flops > 0 and row.phase == "forward" for row in ledger.rows) == len(X)


@pytest.mark.parametrize("foreach", [True, False])
def test_a_step_with_a_gradient_scaler_is_counted_as_it_runs(foreach: bool):
    def trainer() -> tuple[nn.Module, Callable[[nn.Module, Tensor], None]]:
        module = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(module.parameters(), foreach=foreach)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

        def step(module: nn.Module, batch: Tensor) -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = module(batch).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return module, step

    with FakeTensorMode():
        module, step = trainer()
        counted = count(module, X, step)
    module, step = trainer()
    step(module, X)
    metered = meter_step(module, lambda: step(module, X)).ledger
    assert not counted.unknown_operators
    assert _what_ran(counted) == _what_ran(metered)


def _what_ran(ledger: Ledger) -> list[tuple[str, str, int]]:
    # Numbers made for the step's own arithmetic differ: a fake tensor of a known number answers without an operator.
    rows = [(row.operator, row.phase, row.flops) for row in ledger.rows]
    return [row for row in rows if row[0] not in ("_local_scalar_dense", "lift_fresh")]


def test_operators_without_a_formula_are_listed_whatever_their_name():
    class UsesOwn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(own_operator(x) + own_operator(x))

    assert count(UsesOwn(), X).unknown_operators == {"napkin_tests.embedding.default": 2}


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: 1 if x.sum() > 0 else 0, "_local_scalar_dense"),
        (lambda x: x[x > 0], "nonzero"),
        (lambda x: x.numpy(), "numpy"),
        (lambda x: x + torch.ones(8, device="meta"), "device"),
        (lambda x: x @ torch.ones(3, 3), "3"),
    ],
    ids=["item", "branch", "mask", "numpy", "device", "shapes"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_step_that_fails_without_data_is_refused_on_one_line(act: Callable[[Tensor], Any], reason: str):
    with pytest.raises(NapkinError, match=reason) as refusal:
        count(Refuses(act), X)
    assert "\n" not in str(refusal.value)


def test_a_module_without_anything_to_train_is_refused():
    with pytest.raises(NapkinError, match="nothing to train"):
        count(nn.Linear(8, 4).requires_grad_(False), X)


def test_a_module_that_cannot_be_copied_is_refused_and_its_fake_twin_is_counted():
    class KeepsItsOutput(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            self.output = super().forward(input)
            return self.output

    module = KeepsItsOutput(8, 4)
    module(X)
    with pytest.raises(NapkinError, match="KeepsItsOutput cannot be copied"):
        count(module, X)
    with FakeTensorMode():
        assert count(KeepsItsOutput(8, 4), X).forward_flops == 2 * 5 * 8 * 4
    with pytest.raises(NapkinError, match="LazyLinear cannot be copied"):
        count(nn.LazyLinear(4), X)


def test_lists_and_mappings_of_any_kind_are_batches_and_a_view_of_a_corpus_counts_alone():
    corpus = torch.ones(1000, 8)
    one = count(Classifier(), X)
    assert one == count(Classifier(), [corpus[100:105]]) == count(Classifier(), UserDict(x=corpus[3:8]))


@pytest.mark.parametrize("target", ["banana", "cuda:0", ""])
def test_an_unknown_target_is_refused_in_one_line(target: Any):
    with pytest.raises(NapkinError, match=rf"^{target!r}.*use 'cpu', 'cuda'.*CudaTarget$"):
        count(nn.Linear(4, 4), torch.zeros(2, 4), target=target)
