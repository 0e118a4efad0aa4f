"""Programs of torch.compile, counted on fake tensors and run on this CPU."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention

import napkin
from napkin import Ledger, count
from napkin.accounting import OperatorWork, register_operator
from napkin.accounting.custom_operators import _FORMULAS
from napkin.errors import NapkinError
from napkin.hardware.target import CudaTarget
from napkin.torch_compile import set_up_compiler
from oracles.allocator import growth_at_peak, storage_bytes
from oracles.compiled_models import CASES, Layers, vectors

# Two kernels: the C++ compiler takes some seconds for each.
QUICK = ("one layer",)


pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def forget_compiled() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.torture) for name in CASES]
)
def test_the_peak_of_a_compiled_step_is_the_allocators(name: str, one_thread: None) -> None:
    with FakeTensorMode():
        training = CASES[name].training()
        ledger = count(training.module, training.batch, training.step, warm_up=2)
    assert sum(ledger.peak_by_category.values()) == ledger.peak_bytes
    assert not ledger.unknown_operators

    set_up_compiler()
    training = CASES[name].training()
    # Processes that compile beside this one take longer to start than so few kernels to compile.
    with inductor.patch(compile_threads=1):
        for _ in range(3):
            training.step(training.module, training.batch)
    resident = storage_bytes(training.tensors())
    _, growth = growth_at_peak(lambda: training.step(training.module, training.batch))
    assert ledger.resident_bytes == pytest.approx(resident, abs=64)
    assert ledger.peak_bytes == pytest.approx(resident + growth, rel=0.01)


def counted(module: nn.Module, batch: tuple[Tensor, ...], **settings: object) -> Ledger:
    return count(torch.compile(module), batch, **settings)  # pyright: ignore


def test_a_compiled_module_is_counted_with_its_kernels_and_the_eager_one_without() -> None:
    compiled, eager = counted(Layers(), vectors()), count(Layers(), vectors())
    assert any(row.operator.startswith("cpp_fused") for row in compiled.rows)
    assert not any(row.operator.startswith("cpp_fused") for row in eager.rows)
    # Products are not fused: the same are computed, and two of a linear layer's gradient.
    assert compiled.flops == eager.flops
    assert compiled.peak_bytes < eager.peak_bytes
    # Each kernel is known by the module whose operators it fuses.
    assert {row.module for row in compiled.rows if row.contraction} == {"widen", "narrow"}
    assert {row.phase for row in compiled.rows if row.operator.startswith("cpp_fused")} == {"forward", "backward"}


def test_a_step_that_is_compiled_as_a_whole_is_counted_graph_by_graph() -> None:
    def step(module: nn.Module, batch: tuple[Tensor, ...]) -> None:
        module(*batch).backward()
        with torch.no_grad():
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
                parameter.grad = None

    module = Layers()
    plain, compiled = (count(module, vectors(), each) for each in (step, napkin.compiled(step)))
    assert compiled.flops == plain.flops
    fused = {row.phase for row in compiled.rows if row.operator.startswith("cpp_fused")}
    assert fused == {"forward", "backward", "optimizer"}


@pytest.mark.thorough
def test_a_step_for_a_gpu_is_lowered_for_a_gpu() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.norm = nn.Linear(64, 192), nn.LayerNorm(64)

        def forward(self, x: Tensor) -> Tensor:
            heads = self.project(self.norm(x)).view(2, 32, 3, 4, 16).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(*heads, is_causal=True).square().mean()

    def step(module: nn.Module, batch: tuple[Tensor, ...]) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = module(*batch)
        loss.backward()
        module.zero_grad()

    ledger = counted(Attends(), (torch.zeros(2, 32, 64),), step=step, target=CudaTarget(cudnn_attention=False))
    operators = {row.operator for row in ledger.rows}
    assert {"_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"} <= operators
    assert any(name.startswith("triton_") for name in operators)
    assert not any(name.startswith("cpp_") for name in operators)
    assert ledger.reserved_bytes is not None
    assert ledger.peak_bytes % 512 == 0


def test_a_function_that_is_compiled_for_many_shapes_makes_results_of_each() -> None:
    def squared(weight: Tensor) -> Tensor:
        narrow = weight.bfloat16()
        return narrow @ (narrow.T @ narrow) / (narrow.norm() + 1e-7)

    compiled, shapes = torch.compile(squared), []

    def step(module: nn.Module, batch: Tensor) -> None:
        for weight in module.parameters():
            with torch.no_grad():
                shapes.append((tuple(weight.shape), tuple(compiled(weight.detach()).shape)))

    module = nn.ParameterList(torch.zeros(size) for size in ((64, 64), (64, 32), (32, 16), (48, 16)))
    ledger = count(module, torch.zeros(1), step)
    assert shapes
    assert all(one == other for one, other in shapes)
    n_products = sum(row.contraction is not None for row in ledger.rows)
    assert n_products == 2 * len(list(module.parameters()))


def test_layers_that_share_a_program_keep_their_own_names() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return F.silu(self.up(x))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x.square().mean()

    module = Stack()
    for block in module.blocks:
        block.compile()
    ledger = count(module, torch.zeros(8, 16))
    assert any(row.operator.startswith("cpp_fused") for row in ledger.rows)
    products = [(row.phase, row.module) for row in ledger.rows if row.contraction]
    assert [module for phase, module in products if phase == "forward"] == ["blocks.0.up", "blocks.1.up"]
    assert {module for phase, module in products if phase == "backward"} == {"blocks.0.up", "blocks.1.up"}


def test_a_module_of_two_fake_modes_is_refused() -> None:
    layers = []
    for _ in range(2):
        with FakeTensorMode():
            layers.append(nn.Linear(4, 4))
    with pytest.raises(NapkinError, match="belong to 2 FakeTensorModes, and a step has one"):
        count(nn.Sequential(*layers), torch.zeros(2, 4))


@pytest.mark.thorough
def test_flex_attention_is_one_kernel_forward_and_keeps_no_scores() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(64, 192, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).view(2, 256, 3, 2, 32).permute(2, 0, 3, 1, 4)
            return flex_attention(q, k, v, score_mod=lambda score, *_: score.tanh()).square().mean()

    ledger = counted(Attends(), (torch.zeros(2, 256, 64),), target="cuda")
    kernels = [row for row in ledger.rows if row.operator.startswith("triton_tem")]
    pairs = 2 * 2 * 256 * 256
    assert [(row.phase, row.flops, row.recomputed_flops) for row in kernels] == [
        ("forward", 2 * 2 * 32 * pairs, 0),
        ("backward", 4 * 2 * 32 * pairs, 2 * 32 * pairs),
    ]
    assert {row.component for row in kernels} == {"attention scores"}
    assert max(row.bytes_allocated for row in ledger.rows) < 4 * pairs


def test_a_long_cumulative_sum_takes_its_workspace() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale).cumsum(0)

    n = 2**18
    ledger = counted(Sums(), (torch.zeros(n),), step=lambda module, batch: module(*batch), target="cuda")
    # The sums, and 8 bytes for each block of 256 numbers.
    assert sum(row.bytes_allocated for row in ledger.rows) == 4 * n + 8 * n // 256


@torch.library.custom_op("napkin_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda _, gradient: 2 * gradient)


class Doubles(nn.Module):
    """Two graphs under torch.compile, with a custom operator in the second."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.first, self.second, self.breaks = nn.Linear(64, 64), nn.Linear(64, 64), breaks

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return F.gelu(doubled(self.second(x))).sum()


@pytest.mark.thorough
def test_a_custom_operator_in_a_graph_has_the_work_that_was_declared() -> None:
    before = counted(Doubles(breaks=False), vectors())
    assert sum(before.unknown_operators.values()) == 1
    with patch.dict(_FORMULAS):
        register_operator("napkin_tests::doubled")(lambda x: OperatorWork(flops=5))
        declared = counted(Doubles(breaks=False), vectors())
    assert not declared.unknown_operators
    assert declared.flops == before.flops + 5


@pytest.mark.thorough
def test_a_graph_break_is_counted_as_two_graphs() -> None:
    whole, broken = (counted(Doubles(breaks), vectors()) for breaks in (False, True))
    assert broken.flops == whole.flops
    assert [row.operator for row in broken.rows if row.contraction] == [
        row.operator for row in whole.rows if row.contraction
    ]
    assert any(row.operator.startswith("cpp_fused") and row.phase == "forward" for row in broken.rows)


def test_a_count_leaves_compiled_code_as_it_was() -> None:
    calls: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        calls.append("compiled")
        return graph.forward

    module, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    compiled = torch.compile(module, backend=backend)
    before = compiled(x)
    count(compiled, x)  # pyright: ignore[reportArgumentType]
    n_calls = len(calls)
    assert torch.equal(compiled(x), before)
    assert len(calls) == n_calls
