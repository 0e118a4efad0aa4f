"""Models in and out of GGUF files.

A file is read as the Hugging Face folder from which it was made: `ARCHITECTURES` maps its keys to the settings of
config.json, and its tensors' names. Two things are stored otherwise than there: the rows of queries and keys of `llama`
are in the order of pairs that stand side by side, and gains of Gemma's norms have the 1 in them.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from napkin.errors import CorruptFile, NapkinError
from napkin.files import StrPath
from napkin.model.compiled_blocks import CompiledBlocks
from napkin.model.config import ModelConfig
from napkin.model.gguf.block_formats import Integers, format_named
from napkin.model.gguf.gguf_file import GgufFile, Metadata, text_of, write_gguf
from napkin.model.huggingface.convert import (
    as_matrix,
    check_shapes,
    config_of,
    differences,
    family_of,
    fill,
    refuse_other_function,
)
from napkin.model.huggingface.families import Family
from napkin.model.layers import Embedding, Linear, deferred_draws
from napkin.model.positions import llama3, rope_frequencies
from napkin.model.quantized import Int4Linear, Int8Linear, QuantizedLinear, put_quantized
from napkin.model.transformer import Transformer
from napkin.optim.tensor_parts import Parts, parts_of, whole_parts

GgufFormat = Literal["F32", "F16", "BF16", "Q8_0", "Q4_0"]
"""Formats that matrices can be written in."""

_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}
"""general.file_type, by the format of most matrices."""

_LLAMA_SETTINGS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
_LLAMA_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How models of one `general.architecture` are stored; the defaults are Llama's."""

    settings: Mapping[str, str] = field(default_factory=lambda: _LLAMA_SETTINGS)
    """Keys, without the architecture's name before them, by the settings of config.json."""
    names: Mapping[str, str] = field(default_factory=lambda: _LLAMA_NAMES)
    """Names of tensors there by those of the family, without layers and kinds."""
    pairs_side_by_side: bool = False
    """True if rows 2i and 2i + 1 of each head of queries and keys are rotated together, not rows i and i + d / 2."""
    gains_are_whole: bool = False
    """True if gains are stored with the 1 that the family's config.json leaves out."""
    transposed: tuple[str, ...] = ()
    """Names of matrices that the family stores as [inputs, outputs]; here all are [outputs, inputs]."""
    derived: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda settings: {}
    """Settings without a key, which llama.cpp has in its source, derived from the known ones."""


def _gemma2_scale(settings: Mapping[str, Any]) -> dict[str, Any]:
    # In the model with 46 layers the scale is that of the width divided by the number of heads, in the others that of a
    # head.
    is_27b = settings["num_hidden_layers"] == 46
    widths = settings["hidden_size"] / settings["num_attention_heads"] if is_27b else settings["head_dim"]
    return {"query_pre_attn_scalar": widths}


ARCHITECTURES = {
    "llama": Architecture(pairs_side_by_side=True),
    "granite": Architecture(
        settings=_LLAMA_SETTINGS
        | {
            "embedding_multiplier": "embedding_scale",
            "attention_multiplier": "attention.scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        pairs_side_by_side=True,
    ),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "gemma2": Architecture(
        settings=_LLAMA_SETTINGS
        | {
            "sliding_window": "attention.sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        names=_LLAMA_NAMES
        | {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
        gains_are_whole=True,
        derived=_gemma2_scale,
    ),
    "gpt2": Architecture(
        settings={
            "n_positions": "context_length",
            "n_embd": "embedding_length",
            "n_layer": "block_count",
            "n_head": "attention.head_count",
            "n_inner": "feed_forward_length",
            "layer_norm_epsilon": "attention.layer_norm_epsilon",
        },
        names={
            "wte": "token_embd",
            "wpe": "position_embd",
            "ln_f": "output_norm",
            "ln_1": "attn_norm",
            "ln_2": "ffn_norm",
            "attn.c_attn": "attn_qkv",
            "attn.c_proj": "attn_output",
            "mlp.c_fc": "ffn_up",
            "mlp.c_proj": "ffn_down",
        },
        transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
        derived=lambda settings: {"n_inner": settings.get("n_inner")},
    ),
}

_REFUSED = {
    "expert_count": "experts",
    "rope.scaling.attn_factor": "a factor of attention",
    "attention.value_length": "values of another width than keys",
}
_LLAMA3_SCALINGS = ((8.0, 8192), (32.0, 8192))
"""Factors and original contexts of Llama 3.1 and 3.2, whose files have a tensor of divisors in place of both."""
_DIVISORS = "rope_freqs.weight"


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """The config of the model in a file, whose weights are not read. Raises as `load_gguf`."""
    return _described(file)[0]


def load_gguf(path: StrPath, *, dtype: torch.dtype = torch.float32, integers: bool = False) -> Transformer:
    """The model in a GGUF file, in evaluation mode, its integers turned into numbers of `dtype`.

    With `integers`, the matrices of linear layers and embeddings in Q4_0, Q4_1, Q8_0 and Q4_K stay integers, which
    stand for exactly those numbers (`napkin.model.quantized`): for inference. Nothing is allocated before all shapes
    are known to match the metadata. Raises NapkinError for an architecture, settings or number formats that are not
    supported; CorruptFile where the file is damaged or weights are missing.
    """
    with GgufFile(path) as file:
        config, family, factors = _described(file)
        weights = _Weights(file, family, config)
        check_shapes(config, weights)
        with deferred_draws():
            model = Transformer(config, dtype=dtype)
        layers = _integer_layers(model, weights, factors) if integers else {}
        put_quantized(model, layers)
        for name, parameter in list(model.named_parameters()):
            if parameter.is_meta:
                owner, _, last = name.rpartition(".")
                numbers = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                setattr(model.get_submodule(owner), last, numbers)
        parts = whole_parts(model)
        for name, layer in layers.items():
            if layer.bias is not None:
                parts[f"{name.removesuffix('.weight')}.bias"] = parts_of(layer.bias)
        fill(parts, config, weights, factors)
        if layers:
            model.decode_blocks = CompiledBlocks()
    return model.eval()


def _integer_layers(model: Transformer, weights: "_Weights", factors: dict[str, float]) -> dict[str, QuantizedLinear]:
    """Return quantized layers by the names of the matrices that can stay integers as they are in the file."""
    modules = {f"{name}.weight": module for name, module in model.named_modules()}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    made: dict[str, QuantizedLinear] = {}
    for mapping in weights.family.mappings(model.config):
        module = modules.get(mapping.ours)
        scaled = mapping.less or any(re.fullmatch(name, mapping.ours) for name in factors)
        # Exact types only: a subclass computes something else.
        if type(module) not in (Linear, Embedding) or mapping.ours.endswith("router.weight") or scaled:
            continue
        tensors = weights.integers(mapping.theirs)
        if tensors is None:
            continue
        rows, columns = shapes[mapping.ours]
        biases = {} if getattr(module, "bias", None) is None else {"bias": torch.zeros(rows)}
        kind = Int8Linear if tensors["values"].dtype == torch.int8 else Int4Linear
        made[mapping.ours] = kind(rows, columns, tensors | biases)
    return made


def load_gguf_parts(of: ModelConfig, parts: Parts, path: StrPath) -> None:
    """Copy the weights of a file into some parts of a model of the config `of`, which computes the same function.

    Raises as `load_gguf`, and NapkinError for a model of another config; nothing is changed then.
    """
    with GgufFile(path) as file:
        config, family, factors = _described(file)
        refuse_other_function(of, config, str(path))
        weights = _Weights(file, family, config)
        check_shapes(config, weights)
        fill(parts, config, weights, factors)


def _described(file: GgufFile) -> tuple[ModelConfig, Family, dict[str, float]]:
    """Return the config, its family, and the factors of weights by an expression for their names."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CorruptFile(f"'{file.path}' lacks the weight token_embd.weight: download it again")
    divisors = file.read(_DIVISORS) if _DIVISORS in file.tensors else None
    settings = _settings(file.metadata, file.path, divisors)
    settings |= {"vocab_size": embedding.shape[0]}
    if settings["model_type"] != "gpt2":
        settings |= {"tie_word_embeddings": "output.weight" not in file.tensors}
    config, family, factors = config_of(settings, file.path)
    head_dim = config.resolved_head_dim
    rotated = file.metadata.get(f"{settings['model_type']}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise NapkinError(f"'{file.path}' rotates {rotated} of a head's {head_dim} numbers: use a model that turns all")
    return config, family, factors


def _settings(metadata: Metadata, path: Path, divisors: Tensor | None) -> dict[str, Any]:
    """Return the settings of config.json that metadata says, without those that the tensors say."""
    kind = text_of(metadata, "general.architecture")
    if kind not in ARCHITECTURES:
        raise NapkinError(
            f"'{path}' holds a model of architecture {kind[:100]!r}: use one of {', '.join(ARCHITECTURES)}"
        )
    architecture = ARCHITECTURES[kind]
    fields = {key.removeprefix(f"{kind}."): value for key, value in metadata.items()}
    settings = {name: _decimal(fields[key]) for name, key in architecture.settings.items() if key in fields}
    if fields.get("attention.value_length") == _key_length(fields):
        fields.pop("attention.value_length", None)
    for key, what in _REFUSED.items():
        if fields.get(key):
            raise NapkinError(f"'{path}' has {what} ({kind}.{key} {fields[key]!r}): use a model without")
    try:
        settings |= {"model_type": kind} | architecture.derived(settings)
    except (KeyError, TypeError, ZeroDivisionError):
        raise CorruptFile(f"'{path}' lacks sizes of a {kind} model: download it again") from None
    return settings if kind == "gpt2" else settings | _rope_scaling(path, fields, settings, divisors)


def _key_length(fields: Metadata) -> Any:
    """Return the width of keys, which a file may leave out where the heads divide the model's."""
    width, heads = fields.get("embedding_length"), fields.get("attention.head_count")
    if "attention.key_length" in fields or not isinstance(width, int) or not isinstance(heads, int) or heads < 1:
        return fields.get("attention.key_length")
    return width // heads


def _decimal(value: Any) -> Any:
    """Return a number of fp32 as the shortest decimal that it was made of."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _rope_scaling(path: Path, fields: Metadata, settings: Metadata, divisors: Tensor | None) -> Metadata:
    kind = fields.get("rope.scaling.type", "none")
    if divisors is not None:
        for factor, original in _LLAMA3_SCALINGS:
            # As many divisors as a head has planes.
            expected = _llama3_divisors(2 * len(divisors), settings.get("rope_theta", 10000.0), factor, original)
            if torch.allclose(divisors, expected, rtol=1e-3):
                return {
                    "rope_scaling": {
                        "rope_type": "llama3",
                        "factor": factor,
                        "original_max_position_embeddings": original,
                    }
                }
        raise NapkinError(f"'{path}' scales its positions by {_DIVISORS} in a way that is not known: use another")
    if kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": fields.get("rope.scaling.factor")}
    if (original := fields.get("rope.scaling.original_context_length")) is not None:
        scaling["original_max_position_embeddings"] = original
    return {"rope_scaling": scaling}


class _Weights:
    """The tensors of a file under the names and in the layout of its family."""

    def __init__(self, file: GgufFile, family: Family, config: ModelConfig) -> None:
        self.path = file.path
        self.family = family
        self._file, self._config = file, config
        self._architecture = ARCHITECTURES[file.metadata["general.architecture"]]

    def __len__(self) -> int:
        return len(self._file.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        stored, place = _stored_name(name, self._architecture)
        if stored not in self._file.tensors:
            raise CorruptFile(f"'{self.path}' lacks the weight {stored}: download it again")
        shape = self._file.tensors[stored].shape
        return shape[::-1] if place in self._architecture.transposed else shape

    def read(self, name: str, rows: slice, columns: slice, *, transposed: bool) -> Tensor:
        """Read some rows and columns of a matrix; those that the family has transposed are not stored so."""
        stored, place = _stored_name(name, self._architecture)
        entry = self._file.tensors[stored]
        if len(entry.shape) == 1:
            less = 1.0 if self._architecture.gains_are_whole and "norm" in place else 0.0
            return (self._in_order(self._file.read(stored), place)[rows] - less)[:, None]
        # Only blocks that contain requested numbers are decoded.
        order = self._in_order(torch.arange(entry.n_rows), place)[rows]
        first, last = int(order.min()), int(order.max()) + 1
        width = entry.format.n_numbers
        start, end = columns.start // width, -(-columns.stop // width)
        blocks = self._file.blocks(stored, first, last)[order - first, start:end]
        numbers = entry.format.decode(blocks.flatten(0, 1)).view(len(order), -1)
        return numbers[:, columns.start - start * width : columns.stop - start * width]

    def integers(self, names: Sequence[str]) -> dict[str, Tensor] | None:
        """Return the tensors of a quantized layer for some matrices one below the other; None where their formats
        differ or have no integers in groups of 32, and where a scale is not finite."""
        integers: list[Integers] = []
        for name in names:
            stored, place = _stored_name(name, self._architecture)
            entry = self._file.tensors[stored]
            if entry.format.integers is None or len(entry.shape) != 2:
                return None
            blocks = self._file.blocks(stored, 0, entry.n_rows)
            blocks = blocks[self._in_order(torch.arange(entry.n_rows), place)]
            values, scales, minima = entry.format.integers(blocks.flatten(0, 1))
            rows = entry.n_rows, -1
            offsets = None if minima is None else minima.view(rows)
            integers.append(Integers(values.view(rows), scales.view(rows), offsets))
        kinds = {(each.values.dtype, each.scales.dtype, each.minima is None) for each in integers}
        if len(kinds) > 1:
            return None
        values, scales, *offsets = (torch.cat(parts) for parts in zip(*integers, strict=True) if parts[0] is not None)
        if not all(bool(each.isfinite().all()) for each in (scales, *offsets)):
            return None
        values = values if values.dtype == torch.int8 else values[:, ::2] | values[:, 1::2] << 4
        return {"values": values, "scales": scales} | ({"minima": offsets[0]} if offsets else {})

    def _in_order(self, rows: Tensor, place: str) -> Tensor:
        """Return the rows of a file's matrix, or their integers, in the family's order."""
        if self._architecture.pairs_side_by_side and (heads := _rotated_heads(place, self._config)):
            return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return rows


def _stored_name(name: str, architecture: Architecture) -> tuple[str, str]:
    """Return the name in a file of a family's tensor, and its place in the block."""
    match = re.fullmatch(r"(?:(?:layers|h)\.(\d+)\.)?(.+)\.(weight|bias)", name)
    assert match is not None
    layer, place, kind = match.groups()
    return f"{'' if layer is None else f'blk.{layer}.'}{architecture.names[place]}.{kind}", place


def _rotated_heads(place: str, config: ModelConfig) -> int:
    """Return the heads of a matrix of queries or keys, 0 for another."""
    return {"self_attn.q_proj": config.n_heads, "self_attn.k_proj": config.resolved_n_kv_heads}.get(place, 0)


def save_gguf(
    model: Transformer, path: StrPath, *, to: GgufFormat = "F16", vocabulary: Metadata | None = None, name: str = ""
) -> None:
    """Write a model as a new GGUF file, which llama.cpp and Ollama run.

    Matrices are written in the format `to`, where their rows divide into its blocks, else in F16; norms and biases in
    F32. `vocabulary` are the keys of a tokenizer, see `napkin.tokenizer.interchange.gguf`. Raises NapkinError if the
    file exists, if no architecture of llama.cpp computes what the model does, and if it cannot be written.
    """
    family, settings = family_of(model.config)
    kind = settings["model_type"]
    if kind not in ARCHITECTURES:
        raise NapkinError(f"a {kind} model cannot be written as GGUF: it is read there as {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[kind]
    metadata: Metadata = {
        "general.architecture": kind,
        "general.name": name or "model",
        "general.file_type": _FILE_TYPES[to],
        f"{kind}.vocab_size": model.config.vocab_size,
        "general.quantization_version": 2,
    }
    metadata |= {f"{kind}.{key}": settings[each] for each, key in architecture.settings.items() if settings[each]}
    if kind != "gpt2":
        metadata |= {f"{kind}.rope.dimension_count": model.config.resolved_head_dim}
        metadata |= {f"{kind}.attention.value_length": model.config.resolved_head_dim}
        metadata |= _written_scaling(kind, settings["rope_scaling"])
    parts = _written_parts(model, family, architecture)
    if model.config.rope_scaling == "llama3":
        config = model.config
        original = config.resolved_original_context
        parts[_DIVISORS] = _llama3_divisors(config.resolved_head_dim, config.rope_theta, config.rope_factor, original)
    _refuse_what_is_lost(model.config, metadata, settings, parts.get(_DIVISORS))
    shapes = [(each, tuple(part.shape), _written_format(part, to)) for each, part in parts.items()]
    write_gguf(path, metadata | (vocabulary or {}), shapes, lambda each: parts[each])


def _refuse_what_is_lost(
    config: ModelConfig, metadata: Metadata, settings: Mapping[str, Any], divisors: Tensor | None
) -> None:
    """Raise NapkinError where the metadata describes another function than the config's."""
    tied = {"vocab_size": config.vocab_size, "tie_word_embeddings": settings.get("tie_word_embeddings", True)}
    read, *_ = config_of(tied | _settings(metadata, Path("the file"), divisors), Path("the file"))
    for name, ours, theirs in differences(config, read):
        # Numbers are written in fp32.
        if isinstance(ours, float) and isinstance(theirs, float) and math.isclose(ours, theirs, rel_tol=1e-6):
            continue
        raise NapkinError(f"model.{name} is {ours!r}, a GGUF file would say {theirs!r}: it cannot be written as GGUF")


def _written_format(part: Tensor, to: GgufFormat) -> str:
    if part.ndim == 1:
        return "F32"
    return to if part.shape[1] % format_named(to).n_numbers == 0 else "F16"


def _written_parts(model: Transformer, family: Family, architecture: Architecture) -> dict[str, Tensor]:
    """Return the tensors of a file by name, most of them views of the model's parameters."""
    config, parameters = model.config, dict(model.named_parameters())
    parts: dict[str, Tensor] = {}
    for mapping in family.mappings(config):
        whole = as_matrix(parameters[mapping.ours].detach())
        for name, part in zip(mapping.theirs, whole.split(mapping.rows or len(whole)), strict=True):
            stored, place = _stored_name(name, architecture)
            if architecture.pairs_side_by_side and (heads := _rotated_heads(place, config)):
                part = part.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
            parts[stored] = part
    return parts


def _written_scaling(kind: str, rope: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if rope["rope_type"] not in ("default", "llama3"):
        yield f"{kind}.rope.scaling.type", rope["rope_type"]
        yield f"{kind}.rope.scaling.factor", float(rope["factor"])
        yield f"{kind}.rope.scaling.original_context_length", rope["original_max_position_embeddings"]


def _llama3_divisors(head_dim: int, theta: float, factor: float, original_context: float) -> Tensor:
    plain = rope_frequencies(head_dim, theta)
    return (plain / llama3(plain, theta, factor, original_context)[0]).float()
