"""GGUF files: number formats beside plain loops over bytes, whole models there and back, damaged files."""

import dataclasses
import itertools
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

import napkin
from napkin.errors import CorruptFile, NapkinError
from napkin.inference.loaded_model import LoadedModel
from napkin.model.config import ModelConfig
from napkin.model.gguf import is_gguf, load_gguf, save_gguf
from napkin.model.gguf.block_formats import FORMATS, format_named
from napkin.model.gguf.convert import GgufFormat
from napkin.model.gguf.gguf_file import GgufFile, write_gguf
from napkin.model.transformer import Transformer
from napkin.tokenizer import train_bpe
from napkin.tokenizer.interchange import write_huggingface
from napkin.tokenizer.interchange.gguf import gguf_vocabulary, read_gguf_tokenizer
from oracles.model_switches import disturbed
from peers import peer

LLAMA = ModelConfig(
    vocab_size=64, context_length=12, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=64, norm_eps=1e-6,
    rope_theta=500.0, tie_embeddings=False, embedding_scale=1.0,
)  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "llama3": dataclasses.replace(
        LLAMA, head_dim=64, rope_theta=5e5, rope_scaling="llama3", rope_factor=8.0, rope_original_context=8192
    ),
    "granite": ModelConfig(vocab_size=64, context_length=12, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2),
    "qwen2": dataclasses.replace(LLAMA, biases="qkv"),
    "qwen3": dataclasses.replace(LLAMA, qk_norm="head", head_dim=10),
    "gemma2": dataclasses.replace(
        LLAMA, tie_embeddings=True, block="sandwich", feed_forward="geglu_tanh", attention_window=4,
        embedding_scale=32**0.5, full_attention_every=2, attention_softcap=2.0, logit_softcap=3.0,
    ),
    "gpt2": ModelConfig(
        vocab_size=64, context_length=12, d_model=32, n_layers=2, n_heads=4, positions="learned", norm="layer",
        feed_forward="gelu_tanh", biases="all", embedding_scale=1.0,
    ),
}  # fmt: skip


def model_of(config: ModelConfig) -> Transformer:
    return disturbed(config).eval()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_written_and_read_computes_the_same(name: str, tmp_path: Path) -> None:
    model, ids = model_of(MODELS[name]), torch.randint(64, (2, 12))
    save_gguf(model, tmp_path / "model.gguf", to="F32")
    again = load_gguf(tmp_path / "model.gguf")
    torch.testing.assert_close(again(ids), model(ids), rtol=1e-4, atol=1e-5)
    # Eight bits are near, and other numbers.
    save_gguf(model, tmp_path / "small.gguf", to="Q8_0")
    near = load_gguf(tmp_path / "small.gguf")(ids)
    assert 0 < (near - model(ids)).norm() / model(ids).norm() < 0.05
    assert (tmp_path / "small.gguf").stat().st_size < 0.5 * (tmp_path / "model.gguf").stat().st_size


def half(data: bytes, at: int) -> float:
    return struct.unpack_from("<e", data, at)[0]


def four_bits(data: bytes, at: int, i: int) -> int:
    return data[at + i % 16] >> 4 * (i // 16) & 15


def fifth_bit(data: bytes, at: int, i: int) -> int:
    return struct.unpack_from("<I", data, at)[0] >> i & 1


def scale_and_minimum(packed: bytes, j: int) -> tuple[int, int]:
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    return packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4


def k_number(data: bytes, i: int, integer: int) -> float:
    scale, minimum = scale_and_minimum(data[4:16], i // 32)
    return half(data, 0) * scale * integer - half(data, 2) * minimum


def q4_k(data: bytes, i: int) -> float:
    return k_number(data, i, data[16 + i // 64 * 32 + i % 32] >> 4 * (i // 32 % 2) & 15)


def q5_k(data: bytes, i: int) -> float:
    low = data[48 + i // 64 * 32 + i % 32] >> 4 * (i // 32 % 2) & 15
    return k_number(data, i, low | (data[16 + i % 32] >> i // 32 & 1) << 4)


def q6_k(data: bytes, i: int) -> float:
    part, place = divmod(i, 128)
    quarter, column = divmod(place, 32)
    low = data[64 * part + 32 * (quarter % 2) + column] >> 4 * (quarter // 2) & 15
    high = data[128 + 32 * part + column] >> 2 * quarter & 3
    scale = struct.unpack_from("<b", data, 192 + i // 16)[0]
    return half(data, 208) * scale * ((low | high << 4) - 32)


PLAIN: dict[str, Callable[[bytes, int], float]] = {
    "F32": lambda data, i: struct.unpack("<f", data)[0],
    "F16": lambda data, i: half(data, 0),
    "BF16": lambda data, i: struct.unpack("<f", b"\0\0" + data)[0],
    "Q4_0": lambda data, i: half(data, 0) * (four_bits(data, 2, i) - 8),
    "Q4_1": lambda data, i: half(data, 0) * four_bits(data, 4, i) + half(data, 2),
    "Q5_0": lambda data, i: half(data, 0) * ((four_bits(data, 6, i) | fifth_bit(data, 2, i) << 4) - 16),
    "Q5_1": lambda data, i: half(data, 0) * (four_bits(data, 8, i) | fifth_bit(data, 4, i) << 4) + half(data, 2),
    "Q8_0": lambda data, i: half(data, 0) * struct.unpack_from("<b", data, 2 + i)[0],
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
SCALES = {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}
"""Where fp16 numbers stand, if not at the beginning alone."""


def random_blocks(name: str, n: int) -> bytes:
    draw, made = random.Random(name), b""
    for _ in range(n):
        block = bytearray(draw.randbytes(format_named(name).n_bytes))
        for at in SCALES.get(name, (0,)):
            if len(block) > 4:
                block[at : at + 2] = struct.pack("<e", draw.uniform(-2, 2))
        if len(block) <= 4:
            block[-1] = 0x3C
        made += block
    return made


def test_every_format_has_a_plain_form() -> None:
    assert PLAIN.keys() == {each.name for each in FORMATS.values()}


@pytest.mark.parametrize("name", PLAIN)
def test_blocks_are_decoded_as_one_number_after_the_other(name: str) -> None:
    block, data = format_named(name), random_blocks(name, 20)
    found = block.decode(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, block.n_bytes))
    pieces = [data[at : at + block.n_bytes] for at in range(0, len(data), block.n_bytes)]
    expected = [[PLAIN[name](piece, i) for i in range(block.n_numbers)] for piece in pieces]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "steps"), [("Q8_0", 1.15), ("Q4_0", 2.02)])
def test_blocks_are_encoded_to_the_nearest_numbers(name: str, steps: float) -> None:
    block = format_named(name)
    torch.manual_seed(0)
    numbers = torch.randn(50, 32) * torch.logspace(-3, 3, 50)[:, None]
    numbers[0] = 0
    error = (block.decode(block.encode(numbers)) - numbers).abs().amax(dim=1)
    # Half a step, and what fp16 rounds off the scale; of four bits the end without its opposite is a whole one away.
    step = numbers.abs().amax(dim=1) / {"Q8_0": 127, "Q4_0": 8}[name]
    assert (error <= steps * step / 2 + 1e-12).all()
    assert error[0] == 0


TEXT = "the cat sat on the mat, the dog sat on the log. 12 345 \u00e9t\u00e9\n" * 20


def test_a_file_is_a_model_with_its_texts(tmp_path: Path) -> None:
    tokenizer = train_bpe([TEXT], 300, special_tokens=["<|endoftext|>", "<|im_end|>"])
    model = model_of(dataclasses.replace(LLAMA, vocab_size=tokenizer.vocab_size, context_length=64))
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    words = gguf_vocabulary(tokenizer, ["<|endoftext|>"], ["<|im_end|>"], template)
    save_gguf(model, tmp_path / "m.gguf", to="F32", vocabulary=words)
    loaded = napkin.load(tmp_path / "m.gguf")
    assert loaded.tokenizer.encode(TEXT) == tokenizer.encode(TEXT)
    assert loaded.start_ids == (tokenizer.special_tokens["<|endoftext|>"],)
    assert tokenizer.special_tokens["<|im_end|>"] in loaded.stop_ids
    assert loaded.chat([{"role": "user", "content": "the cat"}], max_new_tokens=4)
    plain = LoadedModel.of(model, tokenizer)
    prompt = "the dog"
    assert loaded.generate(prompt, max_new_tokens=8) == plain.generate(prompt, max_new_tokens=8, temperature=0.0)


def test_bytes_without_a_token_are_left_out_as_by_the_library(tmp_path: Path) -> None:
    tokenizer = train_bpe([TEXT], 300)
    words = gguf_vocabulary(tokenizer, [], [])
    # As SmolLM2's vocabulary, which was made without some control characters.
    place = words["tokenizer.ggml.tokens"].index("\u0104")
    words["tokenizer.ggml.tokens"].pop(place)
    words["tokenizer.ggml.token_type"].pop(place)
    lossy = read_gguf_tokenizer(words)
    texts = ["the \x04cat", "\x04", "", "dog\x04\x04s 12", TEXT]
    write_huggingface(lossy, tmp_path / "tokenizer.json")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    expected = [library.encode(text).ids for text in texts]
    assert [lossy.encode(text) for text in texts] == expected
    assert lossy.encode_batch(texts) == expected
    ids, counts = lossy.encode_documents(texts)
    assert counts.tolist() == [len(each) for each in expected]
    assert ids.tolist() == [i for each in expected for i in each]
    assert lossy.encode_to_numpy(texts[0]).tolist() == expected[0]
    assert lossy.decode(expected[0]) == "the cat"


def refusal_of(path: Path) -> str | None:
    try:
        load_gguf(path)
    except NapkinError as error:
        return str(error)
    return None


def test_a_damaged_file_is_refused_or_read(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    save_gguf(model_of(LLAMA), whole, to="Q8_0", vocabulary=gguf_vocabulary(train_bpe([TEXT], 260), [], []))
    data = whole.read_bytes()
    header = data.index(b"output.weight") + 60
    draw, path = random.Random(0), tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(150):
        damaged = bytearray(data)
        if draw.random() < 0.3:
            del damaged[draw.randrange(len(damaged)) :]
        for _ in range(draw.randint(1, 3)):
            if damaged:
                damaged[draw.randrange(min(header, len(damaged)))] = draw.randrange(256)
        path.write_bytes(damaged)
        message = refusal_of(path)
        if message is not None:
            refused += 1
            assert "\n" not in message
            assert str(path) in message
    assert refused > 50


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"general.architecture": "bert"}, "architecture 'bert': use one of llama"),
        ({"llama.expert_count": 8}, "has experts"),
        ({"llama.block_count": 2**31}, "weights, the config says"),
        ({"llama.embedding_length": 64}, "the config says"),
        ({"llama.attention.head_count": "four"}, "is not that of a llama model"),
        ({"general.architecture": 3}, "not a text"),
        ({"llama.rope.dimension_count": 4}, "rotates 4 of a head's 8 numbers"),
    ],
)
def test_what_a_file_says_wrong_is_named(changed: dict[str, object], message: str, tmp_path: Path) -> None:
    save_gguf(model_of(LLAMA), tmp_path / "whole.gguf", to="F32")
    with GgufFile(tmp_path / "whole.gguf") as file:
        shapes = [(name, entry.shape, "F32") for name, entry in file.tensors.items()]
        write_gguf(tmp_path / "changed.gguf", file.metadata | changed, shapes, file.read)
    with pytest.raises(NapkinError, match=message):
        load_gguf(tmp_path / "changed.gguf")


def test_other_files_are_no_gguf_and_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGML and no more")
    assert not is_gguf(path)
    assert not is_gguf(tmp_path)
    with pytest.raises(CorruptFile, match="does not begin with GGUF"):
        load_gguf(path)
    with pytest.raises(NapkinError, match=r"model\.attention_scale is 0\.5"):
        save_gguf(model_of(dataclasses.replace(MODELS["gemma2"], attention_scale=0.5)), tmp_path / "y.gguf")
    assert not (tmp_path / "y.gguf").exists()
    with pytest.raises(NapkinError, match="exists"):
        save_gguf(model_of(LLAMA), path)
    assert path.read_bytes() == b"GGML and no more"


@pytest.mark.peers
@pytest.mark.parametrize("to", ["F16", "Q8_0", "Q4_0"])
def test_the_reader_of_llama_cpp_finds_the_same_numbers(to: GgufFormat, tmp_path: Path) -> None:
    gguf = peer("gguf")
    quants = peer("gguf.quants")
    model = model_of(LLAMA)
    save_gguf(model, tmp_path / "m.gguf", to=to)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    with GgufFile(tmp_path / "m.gguf") as file:
        assert theirs.keys() == file.tensors.keys()
        for name, tensor in theirs.items():
            found = torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type).copy())
            torch.testing.assert_close(file.read(name), found.view(file.tensors[name].shape), rtol=0, atol=0)
    kind = getattr(gguf.GGMLQuantizationType, to)
    weight = dict(model.named_parameters())["blocks.0.attention.output.weight"].detach()
    assert theirs["blk.0.attn_output.weight"].data.tobytes() == quants.quantize(weight.numpy(), kind).tobytes()


@pytest.mark.peers
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2"])
def test_transformers_reads_the_same_model(name: str, tmp_path: Path) -> None:
    transformers = peer("transformers")
    tokenizer = train_bpe([TEXT], 300, special_tokens=["<|endoftext|>"])
    # The library has settings of these families as published, whatever the file says.
    published: dict[str, Any] = {
        "qwen3": {"head_dim": 128},
        "gemma2": {"head_dim": 256, "attention_softcap": 50.0, "logit_softcap": 30.0, "attention_window": 4096},
    }.get(name, {})
    config = dataclasses.replace(MODELS[name], vocab_size=tokenizer.vocab_size, **published)
    model, ids = model_of(config), torch.randint(tokenizer.vocab_size, (2, 12))
    words = gguf_vocabulary(tokenizer, ["<|endoftext|>"], ["<|endoftext|>"])
    save_gguf(model, tmp_path / "m.gguf", to="F32", vocabulary=words)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf").eval()
    with torch.no_grad():
        torch.testing.assert_close(load_gguf(tmp_path / "m.gguf")(ids), theirs(ids).logits, rtol=1e-3, atol=1e-4)


def test_a_vocabulary_with_scores_merges_the_neighbours_whose_union_scores_highest() -> None:
    draw = random.Random(0)
    letters = ["\u2581", *"abcd"]
    made = {"".join(draw.choices(letters, k=draw.randint(2, 4))) for _ in range(60)}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *letters, *sorted(made)]
    scores = {token: -draw.random() for token in made} | dict.fromkeys(letters, -2.0)
    tokenizer = read_gguf_tokenizer({
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [scores.get(token, 0.0) for token in tokens],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(letters) + len(made))],
    })  # fmt: skip

    def merged(text: str) -> list[int]:
        pieces = list("\u2581" + text.replace(" ", "\u2581"))
        while True:
            unions = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in scores]
            if not unions:
                return [tokens.index(piece) for piece in pieces]
            at = -max(unions)[1]
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]

    for _ in range(200):
        text = "".join(draw.choices(" abcd", k=draw.randint(1, 20)))
        assert tokenizer.encode(text) == merged(text)
    assert tokenizer.encode("\u00e9") == [tokens.index("\u2581"), 3 + 0xC3, 3 + 0xA9]
