"""A block's decoding step by Triton's kernels, in Triton's interpreter, against the plain path in fp64."""

import dataclasses
import inspect
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from napkin.inference.paged_cache import KVFormat, PagedCache
from napkin.kernels.decoding.block_step import (
    HeadForm,
    NewSlots,
    Norm,
    Product,
    add_product,
    project_activation,
    project_heads,
)
from napkin.model.config import ModelConfig
from napkin.model.kernel_forms import use_decoding_kernels
from napkin.model.kv_cache import ContiguousCache
from napkin.model.quantized import Int8Linear
from napkin.model.transformer import Transformer
from oracles.model_switches import disturbed

triton_block_step = pytest.importorskip("napkin.kernels.decoding.triton_block_step")
triton_decode = pytest.importorskip("napkin.kernels.attention.triton_decode")
InterpretedFunction = pytest.importorskip("triton.runtime.interpreter").InterpretedFunction

CONFIG = ModelConfig(61, context_length=640, d_model=48, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=72)
FORMS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {
        "norm": "layer",
        "positions": "learned",
        "feed_forward": "gelu_tanh",
        "biases": "all",
        "n_kv_heads": 4,
    },
    "neox": {"block": "parallel", "norm": "layer", "biases": "all", "feed_forward": "gelu"},
    "gpt-j": {"block": "parallel", "norm": "layer", "rope_pairing": "interleaved", "feed_forward": "gelu_tanh"},
    "qwen3": {"qk_norm": "head", "head_dim": 20, "biases": "none"},
    "nope, squared": {"positions": "none", "feed_forward": "relu_squared", "n_kv_heads": 1},
    "windows, cap": {"attention_window": 7, "full_attention_every": 2, "attention_softcap": 5.0},
    "mup": {"mup_base_d_model": 16, "feed_forward": "geglu"},
}
LENGTHS = (5, 40, 17)
SIZE = 8


def model_of(changes: dict[str, Any], dtype: torch.dtype) -> Transformer:
    return disturbed(dataclasses.replace(CONFIG, **changes)).eval().to(dtype)


class Launches(TorchDispatchMode):
    """Counts what a step launches: torch's operators that are no views, and Triton's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.operators: Counter[str] = Counter()
        self._patch = pytest.MonkeyPatch()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        is_view = any(each.alias_info is not None for each in function._schema.arguments) and not any(
            each.alias_info is not None and each.alias_info.is_write for each in function._schema.arguments
        )
        # Where a result is made is no launch, and operators of our own are counted by their kernels.
        if not (is_view or function.namespace == "napkin" or "empty" in function.__name__):
            self.operators[function.__name__] += 1
        return made

    def __enter__(self) -> "Launches":
        run = InterpretedFunction.run

        def counted(kernel: Any, *args: Any, **settings: Any) -> Any:
            self.kernels[kernel.__name__] += 1
            with torch._C._DisableTorchDispatch():
                return run(kernel, *args, **settings)

        self._patch.setattr(InterpretedFunction, "run", counted)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()

    @property
    def total(self) -> int:
        return self.kernels.total() + self.operators.total()


@torch.inference_mode()
def decoded(
    model: Transformer,
    kv: KVFormat = "auto",
    dtype: torch.dtype = torch.float32,
    lengths: Sequence[int] = LENGTHS,
    *,
    hide: bool = True,
) -> tuple[Tensor, PagedCache, Launches]:
    """Hidden states of a new token of each sequence; with `hide`, all that no token has written is NaN."""
    n_of_each = [-(-(length + 1) // SIZE) for length in lengths]
    n_blocks = sum(n_of_each)
    order = torch.randperm(n_blocks, generator=torch.Generator().manual_seed(3)).tolist()
    tables = [[order.pop() for _ in range(n)] for n in n_of_each]
    cache = PagedCache(model.config, n_blocks, SIZE, dtype=dtype, kv=kv)
    draw = torch.Generator().manual_seed(0)
    for length, table in zip(lengths, tables, strict=True):
        tokens = torch.randint(61, (1, length), generator=draw)
        model.hidden(tokens, cache=cache.extend([table], [0], [length], length))
    for held in (*cache.keys.values(), *cache.values.values()) if hide else ():
        hidden = held.numbers if held.scales is None else held.scales
        hidden[n_blocks] = float("nan")
        for length, table in zip(lengths, tables, strict=True):
            hidden[table[length // SIZE], :, length % SIZE :] = float("nan")
    tokens = torch.randint(61, (len(lengths), 1), generator=draw)
    extending = cache.extend(tables, list(lengths), [1] * len(lengths), 1)
    with Launches() as launches:
        hidden = model.hidden(tokens, cache=extending)
    return hidden, cache, launches


def plainly(form: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **given: Any) -> tuple[Tensor, PagedCache]:
    """The same hidden states by the plain operators, of gathered blocks, in fp64."""
    with monkeypatch.context() as patch:
        patch.setattr("napkin.inference.paged_cache.reads_slots", lambda *_: False)
        return decoded(model_of(form, torch.float64), dtype=torch.float64, hide=False, **given)[:2]


@pytest.mark.parametrize(
    ("form", "kv"),
    [*((form, "auto") for form in FORMS), ("llama", "int8"), ("qwen3", "int8"), ("windows, cap", "int8")],
)
def test_a_step_is_that_of_the_plain_path(form: str, kv: KVFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, held = plainly(FORMS[form], monkeypatch, kv=kv)
    model = model_of(FORMS[form], torch.float32)
    assert use_decoding_kernels(model) is None
    found, cache, launches = decoded(model, kv, hide=kv == "auto")
    assert launches.kernels == dict.fromkeys(("heads_kernel", "split_kernel", "activation_kernel"), 2) | {
        "sum_kernel": 4
    }
    # In int8 a number of the cache may be rounded to its other neighbour.
    bound = 2e-5 if kv == "auto" else 2e-2
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)
    for ours, plain in zip(
        (*cache.keys.values(), *cache.values.values()), (*held.keys.values(), *held.values.values()), strict=True
    ):
        numbers = ours.numbers.nan_to_num() if kv == "auto" else ours.numbers
        torch.testing.assert_close(numbers.double(), plain.numbers.double(), rtol=1e-5, atol=2e-5 + (kv == "int8"))


@pytest.mark.parametrize(("lengths", "joins"), [((600,), 0), ((600, 3, 520, 40, 7), 1)])
def test_splits_are_joined_in_the_product_or_before_it(
    lengths: tuple[int, ...], joins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {"n_layers": 1}
    expected, _ = plainly(form, monkeypatch, lengths=lengths)
    model = model_of(form, torch.float32)
    use_decoding_kernels(model)
    found, _, launches = decoded(model, lengths=lengths)
    assert launches.kernels["join_kernel"] == joins
    assert launches.kernels["sum_kernel"] == 2
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)


def test_a_layer_is_launched_at_most_six_times_and_adds_nothing_atomically() -> None:
    def per_layer(form: str, lengths: tuple[int, ...], *, fused: bool) -> int:
        totals = []
        for n_layers in (1, 2):
            model = model_of(FORMS[form] | {"n_layers": n_layers, "full_attention_every": None}, torch.float32)
            if fused:
                use_decoding_kernels(model)
            totals.append(decoded(model, lengths=lengths)[2].total)
        return totals[1] - totals[0]

    for form in ("llama", "gpt2", "qwen3"):
        before = per_layer(form, (5, 17), fused=False)
        assert per_layer(form, (5, 17), fused=True) == 5 < before
        assert before > 10
    # Many sequences with long keys: their splits are joined in a launch of their own.
    assert per_layer("llama", (600, 520, 3, 4, 5), fused=True) == 6
    assert "atomic" not in inspect.getsource(triton_block_step) + inspect.getsource(triton_decode)


@torch.inference_mode()
def test_a_contiguous_cache_gets_its_new_keys_too(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(61, (2, 20), generator=draw)
    for form in ("llama", "windows, cap"):
        hidden = []
        for dtype in (torch.float64, torch.float32):
            model = model_of(FORMS[form], dtype)
            if dtype == torch.float32:
                use_decoding_kernels(model)
            else:
                monkeypatch.setattr("napkin.model.kv_cache.reads_slots", lambda *_: False)
            cache = ContiguousCache(model.config, 2, 32, dtype=dtype)
            model.hidden(tokens[:, :9], cache=cache.extend(9, [9, 4]))
            steps = [model.hidden(tokens[:, place, None], cache=cache.extend(1)) for place in range(9, 20)]
            hidden.append(torch.cat(steps, dim=1).double())
            monkeypatch.undo()
        torch.testing.assert_close(hidden[1], hidden[0], rtol=2e-5, atol=2e-5)


def framed(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers, with NaN behind the last."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    held = torch.full((numbers.numel() + 300,), float("nan"), dtype=dtype)
    held[: numbers.numel()] = numbers.flatten()
    return held[: numbers.numel()].view(shape)


def int8_matrix(rows: int, columns: int) -> list[Tensor]:
    tensors = Int8Linear.quantized(framed(rows, columns, seed=1))
    return [tensors["values"], tensors["scales"].float()]


@torch.inference_mode()
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("n", "rows", "columns"), [(1, 33, 50), (17, 40, 129), (32, 16, 300)])
def test_products_of_odd_sizes_read_nothing_beyond_their_tensors(n: int, rows: int, columns: int, int8: bool) -> None:
    x, gain, shift, bias = (
        framed(n, columns, seed=3),
        *(framed(columns, seed=s) for s in (4, 5)),
        framed(2 * rows, seed=6),
    )
    matrix = int8_matrix(2 * rows, columns) if int8 else [framed(2 * rows, columns, seed=9)]
    weight = matrix[0].double() if len(matrix) == 1 else matrix[0].double() * matrix[1].double()[:, None]
    normed = F.layer_norm(x.double(), (columns,), gain.double(), shift.double(), 1e-5)
    up = normed @ weight.T + bias.double()
    found = project_activation(x, Norm(gain, shift, 1e-5, True), Product(matrix, bias), "silu", gated=True)
    torch.testing.assert_close(found.double(), F.silu(up[:, :rows]) * up[:, rows:], rtol=2e-5, atol=2e-4)
    residual = framed(n, 2 * rows, seed=11)
    found = add_product(x[:, None, None], None, Product(matrix, bias, 0.5), residual)
    expected = residual.double() + 0.5 * x.double() @ weight.T + bias.double()
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-4)


@torch.inference_mode()
@pytest.mark.parametrize(("width", "interleaved"), [(64, False), (6, True), (34, False), (80, True)])
def test_heads_in_fp16_go_to_their_slots_alone(width: int, interleaved: bool) -> None:
    n, columns, n_heads, n_kv_heads = 3, 70, 3, 1
    given = [framed(*shape, seed=seed, dtype=torch.float16) for seed, shape in enumerate([(n, columns), (columns,)])]
    x, gain = given
    weight = framed((n_heads + 2) * width, columns, seed=2, dtype=torch.float16)
    angles = torch.randn(n, width, generator=torch.Generator().manual_seed(4)), framed(n, width, seed=5)
    keys, values = (torch.full((4, n_kv_heads, 5, width), float("nan"), dtype=torch.float16) for _ in range(2))
    blocks, slots = torch.tensor([2, 0, 2]), torch.tensor([4, 0, 1])
    norm, product = Norm(gain, None, 1e-5, False), Product([weight], None)
    form = HeadForm(n_heads, cosines=angles[0], signed_sines=angles[1], interleaved=interleaved)
    queries = project_heads(x, norm, product, form, NewSlots(keys, values, blocks, slots))
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * gain.double()
    heads = (normed @ weight.double().T).view(n, n_heads + 2, width)
    swapped = heads.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else heads.roll(width // 2, dims=-1)
    turned = heads * angles[0][:, None] + swapped * angles[1][:, None]
    torch.testing.assert_close(queries[:, :, 0].double(), turned[:, :n_heads], rtol=2e-2, atol=5e-2)
    torch.testing.assert_close(keys[blocks, :, slots].double(), turned[:, n_heads : n_heads + 1], rtol=2e-2, atol=5e-2)
    torch.testing.assert_close(values[blocks, :, slots].double(), heads[:, n_heads + 1 :], rtol=2e-2, atol=5e-2)
    for held in (keys, values):
        assert int(held.isfinite().sum()) == n * n_kv_heads * width


def test_models_that_have_no_such_step_keep_their_path() -> None:
    for changes in (
        {"block": "post"},
        {"block": "sandwich"},
        {"n_experts": 4},
        {"qk_norm": "all_heads"},
        {"norm": "none"},
    ):
        model = model_of(changes, torch.float32)
        assert use_decoding_kernels(model)
        _, _, launches = decoded(model)
        assert "heads_kernel" not in launches.kernels
