"""GGUF matrices that stay integers: the numbers that they stand for, their products, whole models, parts of one."""

import dataclasses
import os
import platform
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import napkin
from napkin.accounting.recording import record
from napkin.inference.generation import generate
from napkin.inference.settings import Sampling
from napkin.kernels.products.quantized import integer_product
from napkin.machine_code.processor import processor_name_and_features
from napkin.model.config import ModelConfig
from napkin.model.gguf import load_gguf, save_gguf
from napkin.model.gguf.block_formats import format_named
from napkin.model.gguf.convert import GgufFormat, load_gguf_parts
from napkin.model.gguf.gguf_file import GgufFile, write_gguf
from napkin.model.layers import Linear
from napkin.model.quantized import Int4Linear, Int8Linear, QuantizedLinear, weight_bytes_of
from napkin.optim.tensor_parts import Part
from napkin.tokenizer import train_bpe
from napkin.tokenizer.interchange.gguf import gguf_vocabulary
from oracles.model_switches import disturbed

LLAMA = ModelConfig(
    vocab_size=96, context_length=32, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=96, norm_eps=1e-6,
    rope_theta=500.0, embedding_scale=1.0,
)  # fmt: skip
FORMATS = ["Q4_0", "Q4_1", "Q4_K", "Q8_0"]
PRODUCTS = "products_are or a_product_with_its_bias or products_with_vectors or each_scale"


def random_blocks(name: str, n_rows: int, n_columns: int) -> Tensor:
    """Rows of blocks of random integers with scales in fp16, as they are in a file."""
    draw, block = random.Random(name), format_named(name)
    made = bytearray()
    for _ in range(n_rows * n_columns // block.n_numbers):
        data = bytearray(draw.randbytes(block.n_bytes))
        for at in (0, 2) if name in ("Q4_1", "Q4_K") else (0,):
            data[at : at + 2] = struct.pack("<e", draw.choice([1.0, -1.0, 2.0**-18]) * draw.uniform(0.01, 2))
        made += data
    return torch.frombuffer(made, dtype=torch.uint8).view(-1, block.n_bytes)


def layer_of(name: str, n_rows: int, n_columns: int) -> tuple[QuantizedLinear, Tensor]:
    """A layer of random blocks, and the numbers that the format's decoder makes of them."""
    block, blocks = format_named(name), random_blocks(name, n_rows, n_columns)
    assert block.integers is not None
    parts = [None if each is None else each.view(n_rows, -1) for each in block.integers(blocks)]
    values, scales, minima = parts
    assert values is not None
    assert scales is not None
    whole = values.dtype == torch.int8
    tensors = {"values": values if whole else values[:, ::2] | values[:, 1::2] << 4, "scales": scales}
    tensors |= {} if minima is None else {"minima": minima}
    layer = (Int8Linear if whole else Int4Linear)(n_rows, n_columns, tensors)
    return layer, block.decode(blocks).view(n_rows, n_columns)


@pytest.mark.parametrize("name", FORMATS)
def test_integers_stand_for_the_numbers_of_the_file(name: str) -> None:
    layer, numbers = layer_of(name, 7, 512)
    assert torch.equal(layer.weight, numbers)
    ids = torch.tensor([[3, 0], [6, 3]])
    assert torch.equal(layer.rows(ids), numbers[ids])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n_rows", [1, 7, 64])
@pytest.mark.parametrize("n_columns", [512, 288, 352])
def test_products_are_those_of_the_numbers(name: str, n_rows: int, n_columns: int) -> None:
    n_columns = -(-n_columns // format_named(name).n_numbers) * format_named(name).n_numbers
    layer, numbers = layer_of(name, n_rows, n_columns)
    x = torch.randn(5, n_columns, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 5)[:, None]
    expected = x.double() @ numbers.double().T
    found = layer(x)
    assert found.dtype == torch.float32
    # A number of x is rounded by at most 1/65534 of the largest of 32.
    bound = (
        x.double().unflatten(1, (-1, 32)).abs().amax(2).repeat_interleave(32, 1) @ numbers.double().abs().T
    ) / 65534
    assert ((found - expected).abs() <= bound + 1e-6 * expected.abs()).all()
    # Alone and beside others a vector has the same product, and half as exact numbers are taken as they are.
    assert torch.equal(layer(x[2:3])[0], found[2])
    assert torch.equal(layer(x.bfloat16()), layer(x.bfloat16().float()).bfloat16())


@pytest.mark.parametrize("n_groups", [1, 13])
def test_each_scale_in_fp16_is_taken_as_it_is(n_groups: int) -> None:
    every = torch.arange(2**16).to(torch.int16).view(torch.float16)
    scales = every[: every.numel() // n_groups * n_groups].view(-1, n_groups)
    n_rows, n_columns = len(scales), 32 * n_groups
    values = torch.ones(n_rows, n_columns, dtype=torch.int8)
    layer = Int8Linear(n_rows, n_columns, {"values": values, "scales": scales})
    found = layer(torch.ones(1, n_columns))[0]
    torch.testing.assert_close(found, 32 * scales.float().sum(1), rtol=1e-5, atol=1e-9, equal_nan=True)


AVX2 = "+avx2,+fma,+f16c"
PROCESSORS = {
    "avx512": ("skylake-avx512", AVX2 + ",+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"),
    "avx2": ("haswell", AVX2),
    "sse2": ("x86-64", ""),
}


@pytest.mark.thorough
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are processors of x86")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_processor_with_fewer_instructions_gives_the_products(processor: str, tmp_path: Path) -> None:
    name, features = PROCESSORS[processor]
    lines = set(processor_name_and_features().split())
    if processor != "sse2" and not {each.lstrip("+") for each in features.split(",")} <= lines:
        pytest.skip(f"this processor has no {processor}")
    capped = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "NAPKIN_CACHE_DIR": str(tmp_path)}
    files = [str(Path(__file__).with_name(each)) for each in ("test_gguf_integers.py", "test_quantized.py")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not thorough", "-k", PRODUCTS, *files],
        env={**os.environ, **capped},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def test_a_number_that_is_not_finite_is_seen_in_the_product() -> None:
    layer, _ = layer_of("Q4_1", 8, 256)
    for wrong in (float("nan"), float("inf"), -float("inf")):
        x = torch.ones(3, 256)
        x[1, 100] = wrong
        finite = layer(x).isfinite()
        assert finite[[0, 2]].all()
        assert not finite[1].any()


def test_a_product_is_an_operator_that_is_counted() -> None:
    layer, _ = layer_of("Q4_0", 48, 64)
    x = torch.ones(3, 64)
    others = None, None, None
    ledger = record(torch.nn.Identity(), lambda: integer_product(x, layer.values, layer.scales, *others), warm_up=0)
    (row,) = [row for row in ledger.rows if row.flops]
    assert (row.operator, row.flops) == ("integer_product", 2 * 3 * 48 * 64)
    assert row.bytes_read == 48 * 64 // 2 + 2 * 48 * 2 + 4 * 3 * 64


@pytest.mark.parametrize("to", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("changes", [{}, {"biases": "qkv", "tie_embeddings": False}], ids=["llama", "qwen2"])
def test_a_model_in_integers_is_the_model_of_its_numbers(to: GgufFormat, changes: dict, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    save_gguf(disturbed(dataclasses.replace(LLAMA, **changes)), path, to=to)
    plain, integers = load_gguf(path), load_gguf(path, integers=True)
    assert not any(isinstance(each, Linear) for each in integers.modules())
    ids = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(integers(ids), plain(ids), rtol=1e-3, atol=1e-3)
    greedy = Sampling(temperature=0.0)
    prompt = ids[0].tolist()
    assert list(generate(integers, prompt, 12, greedy)) == list(generate(plain, prompt, 12, greedy))
    held = {each.data_ptr(): each.nbytes for each in (*integers.parameters(), *integers.buffers())}
    tables = sum(each.nbytes for each in plain.buffers())
    with GgufFile(path) as file:
        in_file = sum(entry.n_bytes for entry in file.tensors.values())
    assert sum(held.values()) - tables == in_file
    assert weight_bytes_of(integers) == in_file


def test_matrices_of_several_formats_side_by_side_become_numbers(tmp_path: Path) -> None:
    save_gguf(disturbed(LLAMA), tmp_path / "m.gguf", to="Q8_0")
    with GgufFile(tmp_path / "m.gguf") as file:
        mixed = [
            (name, entry.shape, "Q4_0" if name == "blk.0.attn_v.weight" else entry.format.name)
            for name, entry in file.tensors.items()
        ]
        write_gguf(tmp_path / "mixed.gguf", file.metadata, mixed, file.read)
    model, plain = load_gguf(tmp_path / "mixed.gguf", integers=True), load_gguf(tmp_path / "mixed.gguf")
    kinds = [type(block.attention.query_key_value) for block in model.blocks]  # pyright: ignore
    assert kinds == [Linear, Int8Linear]
    ids = torch.randint(96, (1, 12))
    torch.testing.assert_close(model(ids), plain(ids), rtol=1e-3, atol=1e-3)


def test_a_part_of_a_matrix_is_read_without_the_rest(tmp_path: Path) -> None:
    save_gguf(disturbed(LLAMA), tmp_path / "m.gguf", to="Q8_0")
    whole = dict(load_gguf(tmp_path / "m.gguf").named_parameters())
    for name in ("blocks.0.attention.query_key_value.weight", "blocks.1.feed_forward.down.weight", "embedding.weight"):
        rows, columns = whole[name].shape
        for first_row, last_row, first, last in (
            (0, rows, 5, 40),
            (3, rows - 6, 0, columns),
            (9, 10, columns - 1, columns),
        ):
            part = Part(torch.empty(last_row - first_row, last - first), (first_row, first), (rows, columns))
            load_gguf_parts(LLAMA, {name: [part]}, tmp_path / "m.gguf")
            assert torch.equal(part.tensor, whole[name][first_row:last_row, first:last])
    with GgufFile(tmp_path / "m.gguf") as file:
        assert file.blocks("blk.0.attn_q.weight", 8, 11).shape == (3, 2, 34)


def test_a_width_of_values_alone_is_that_of_keys(tmp_path: Path) -> None:
    save_gguf(disturbed(LLAMA), tmp_path / "m.gguf", to="F32")
    with GgufFile(tmp_path / "m.gguf") as file:
        shapes = [(name, entry.shape, "F32") for name, entry in file.tensors.items()]
        metadata = {key: value for key, value in file.metadata.items() if not key.endswith("key_length")}
        assert metadata["llama.attention.value_length"] == 16
        write_gguf(tmp_path / "alone.gguf", metadata, shapes, file.read)
    assert load_gguf(tmp_path / "alone.gguf").config.resolved_head_dim == 16


def test_an_opened_file_keeps_its_integers_unless_numbers_are_asked_for(tmp_path: Path) -> None:
    text = "the cat sat on the mat, the dog sat on the log. " * 20
    tokenizer = train_bpe([text], 300, special_tokens=["<|endoftext|>"])
    model = disturbed(dataclasses.replace(LLAMA, vocab_size=tokenizer.vocab_size))
    words = gguf_vocabulary(tokenizer, ["<|endoftext|>"], ["<|endoftext|>"])
    save_gguf(model, tmp_path / "m.gguf", to="Q8_0", vocabulary=words)
    kept, whole = (napkin.load(tmp_path / "m.gguf", weights=each) for each in ("auto", "fp32"))
    assert any(isinstance(each, QuantizedLinear) for each in kept.model.modules())
    assert not any(isinstance(each, QuantizedLinear) for each in whole.model.modules())
    assert kept.generate("the dog", max_new_tokens=8) == whole.generate("the dog", max_new_tokens=8)
    assert kept.n_parameters == sum(each.numel() for each in model.parameters())
    kept.export(tmp_path / "again.gguf", to="Q8_0")
    assert (tmp_path / "again.gguf").stat().st_size == (tmp_path / "m.gguf").stat().st_size
