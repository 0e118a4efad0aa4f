"""Bits per byte of a text: loss and perplexity of a model beside general compressors, the result as a file, and the
comparison of two results.
"""

import gzip
import lzma
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from napkin.data.batches import IGNORE_INDEX, document_ids, evaluation_windows
from napkin.data.token_file import TokenFile
from napkin.distributed.parallel_model import ParallelModel
from napkin.distributed.ranks import ALONE
from napkin.errors import NapkinError
from napkin.evaluation.text_windows import SampledBits
from napkin.hardware.host import detect_host
from napkin.json_files import read_json
from napkin.model.kernel_forms import compiled_kernels, is_worth_compiling
from napkin.model.transformer import Transformer, evaluation_mode
from napkin.recipe.layout import Layout
from napkin.recipe.precision import Precision, choose_precision
from napkin.runs.accounting_files import Evaluation as Evaluation
from napkin.tokenizer.base import Tokenizer

EVALUATION_BATCH_SIZE = 16


def evaluate(
    model: Transformer,
    token_file: TokenFile,
    tokenizer: Tokenizer,
    precision: Precision | None = None,
    *,
    step: int = 0,
    separate_documents: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Predict every token of a token file but the first, each once, with at least half a context before it.

    `precision` None is bf16 where the model's device multiplies it natively, else fp32. `progress(done, total)` counts
    tokens. The compressors get the predicted text as one stream, so that they can use earlier documents too. Raises
    NapkinError where the file holds no text, and where words are unknown to the tokenizer: their bytes are not
    predicted, so bits per byte would be too low.
    """
    ids = np.asarray(token_file.tokens)
    # Nothing precedes the first token: if it is not a separator, its bytes are not predicted.
    predicted = ids[1:]
    text = tokenizer.decode_bytes(predicted[predicted != token_file.separator].tolist())
    if not text:
        raise NapkinError(f"'{token_file.path}' holds no text, only separators: name a token file that does")
    if tokenizer.unknown_id is not None and (n_unknown := int(np.count_nonzero(ids == tokenizer.unknown_id))):
        raise NapkinError(
            f"{n_unknown:,} of the {token_file.n_tokens:,} tokens of '{token_file.path}' are words that the "
            "tokenizer does not know, whose bytes are lost: bits per byte need a lossless tokenizer, such as "
            "--kind bpe"
        )
    if precision is None:
        device_type = "cuda" if next(model.parameters()).is_cuda else "cpu"
        precision = choose_precision("auto", device_type, detect_host())
    stride = max(1, model.config.context_length // 2)
    loss = mean_loss(
        model, token_file, precision, stride=stride, separate_documents=separate_documents, progress=progress
    )
    tokens = token_file.n_tokens - 1
    return Evaluation(
        step=step,
        tokens=tokens,
        bytes=len(text),
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=loss * tokens / math.log(2) / len(text),
        gzip_bits_per_byte=8 * len(gzip.compress(text, compresslevel=9)) / len(text),
        xz_bits_per_byte=8 * len(lzma.compress(text, preset=9)) / len(text),
    )


def sampled_bits_per_byte(
    model: Transformer,
    token_file: TokenFile,
    tokenizer: Tokenizer,
    precision: Precision,
    *,
    max_tokens: int,
    separate_documents: bool = False,
) -> tuple[float, int]:
    """Bits per byte of the first predictions of a file, up to `max_tokens`, and how many they are.

    Each token has at least half a context before it. Raises NapkinError where these tokens are not text.
    """
    n_tokens = min(max_tokens, token_file.n_tokens - 1)
    ids = np.asarray(token_file.tokens[1 : n_tokens + 1])
    n_bytes = len(tokenizer.decode_bytes(ids[ids != token_file.separator].tolist()))
    if not n_bytes:
        raise NapkinError(f"the first {n_tokens:,} tokens of '{token_file.path}' hold no text: use more of them")
    stride = max(1, model.config.context_length // 2)
    loss = mean_loss(
        model, token_file, precision, max_tokens=n_tokens, stride=stride, separate_documents=separate_documents
    )
    return loss * n_tokens / math.log(2) / n_bytes, n_tokens


@torch.no_grad()
def mean_loss(
    model: Transformer,
    token_file: TokenFile,
    precision: Precision,
    *,
    max_tokens: int | None = None,
    stride: int | None = None,
    batch_size: int = EVALUATION_BATCH_SIZE,
    separate_documents: bool = False,
    progress: Callable[[int, int], None] | None = None,
    parallel_model: ParallelModel | None = None,
) -> float:
    """Nats per token over the first `max_tokens` predictions of a file, or all, in windows every `stride` tokens.

    The default stride is the context length: fastest, but the first tokens of each window have little context. With
    `separate_documents` documents are masked from each other. Where `model` is that of a `parallel_model`, each rank
    that has rows of its own takes `batch_size` windows at a time, and all return the mean.
    """
    parallel_model = parallel_model or ParallelModel(model, ALONE, Layout())
    context_length = model.config.context_length
    stride = context_length if stride is None else stride
    total = token_file.n_tokens - 1 if max_tokens is None else min(max_tokens, token_file.n_tokens - 1)
    nats, done = torch.zeros((), dtype=torch.float64, device=precision.device_type), 0
    computed = total * context_length // stride
    compiled = (precision.device_type, precision.products) == ("cpu", "bf16") and is_worth_compiling(
        model.config, computed, trained=False
    )
    with compiled_kernels(model) if compiled else nullcontext():
        for inputs, targets in evaluation_windows(
            token_file,
            context_length=context_length,
            stride=stride,
            batch_size=batch_size * parallel_model.layout.batch_parts,
        ):
            scores = targets >= 0
            targets[scores & (scores.flatten().cumsum(0).view_as(scores) > total - done)] = IGNORE_INDEX
            scored = int((targets >= 0).sum())
            # Windows after the last token of the sample have nothing to predict.
            n_windows = int((targets >= 0).any(dim=1).sum())
            inputs, targets = inputs[:n_windows], targets[:n_windows]
            missing = -len(inputs) % parallel_model.layout.batch_parts
            if missing:
                # Every rank gets the same number of windows, padded with windows without targets.
                inputs = torch.cat([inputs, inputs[-1:].expand(missing, -1)])
                targets = torch.cat([targets, torch.full_like(targets[-1:], IGNORE_INDEX).expand(missing, -1)])
            rows = parallel_model.rows(len(inputs))
            inputs, targets = inputs[rows], targets[rows]
            inputs, targets = inputs.to(precision.device_type), targets.to(precision.device_type)
            documents = document_ids(inputs, token_file.separator) if separate_documents else None
            with evaluation_mode(model), precision.autocast():
                nats += parallel_model.evaluation_nats(inputs, targets, documents)
            done += scored
            if progress is not None:
                progress(done, total)
            if done >= total:
                break
    return parallel_model.ranks.all_reduce_sum(nats.cpu()).item() / done


FORMAT = "napkin-bits-per-byte"
VERSION = 1


@dataclass(frozen=True)
class BitsResult:
    """The file of a measurement of bits per byte."""

    format: str
    version: int
    text: dict[str, Any]
    """Source of the text, and the SHA-256 of its documents."""
    model: dict[str, Any]
    made_with: dict[str, str]
    bits: SampledBits


@dataclass(frozen=True)
class BitsDifference:
    """Bits per byte of the first less those of the second; the samples are independent."""

    difference: float
    standard_error: float
    p_value: float
    """Two-sided, of a normal distribution."""


def bits_result(
    bits: SampledBits, text: Mapping[str, Any], model: Mapping[str, Any], made_with: Mapping[str, str]
) -> BitsResult:
    return BitsResult(FORMAT, VERSION, dict(text), dict(model), dict(made_with), bits)


def read_bits_result(path: Path) -> BitsResult | None:
    """Read a result; None where the file is another kind of result. Raises NapkinError where there is none."""
    values = read_json(path, dict)
    if values is None:
        raise NapkinError(f"there is no result '{path}': write one with `napkin evaluate RUN --text FILE`")
    return read_json(path, BitsResult) if values.get("format") == FORMAT else None


def compare_bits(first: BitsResult, second: BitsResult) -> BitsDifference:
    """The difference of two models on one text, whatever their tokenizers.

    Raises NapkinError for results of different texts. A tokenizer that changes the text has other documents.
    """
    if first.text.get("sha256") != second.text.get("sha256"):
        raise NapkinError(
            f"the results are of different texts ({_text(first)}; {_text(second)}), or a tokenizer changes the text: "
            "measure both on one --text"
        )
    difference = first.bits.bits_per_byte - second.bits.bits_per_byte
    error = math.hypot(first.bits.standard_error, second.bits.standard_error)
    if error:
        from scipy import stats

        p_value = float(2 * stats.norm.sf(abs(difference) / error))
    else:
        p_value = float(difference == 0)
    return BitsDifference(difference, error, p_value)


def _text(result: BitsResult) -> str:
    return f"{result.text.get('name')} {str(result.text.get('sha256'))[:8]}"
