"""`napkin prune` writes a smaller model, without the heads, hidden units, channels and layers that matter least on a
text."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from napkin.cli.common.files import folder_for, refuse_existing
from napkin.cli.common.options import RunOptions, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.cli.models.calibration_text import calibration_windows, require_calibration_tokens
from napkin.errors import NapkinError
from napkin.units import format_bytes, format_count, format_flops

if TYPE_CHECKING:
    from napkin.evaluation.text_windows import Documents, SampledBits
    from napkin.inference.loaded_model import LoadedModel
    from napkin.model.config import ModelConfig
    from napkin.model.pruning import Kept


@dataclass(frozen=True)
class PruneOptions(RunOptions):
    """Write a smaller model as a new Hugging Face folder, without those groups of heads, hidden units, channels and
    layers of a model that matter least on a calibration text. Before it is written, it is said what that saves and what
    it costs in bits per byte, beside parts drawn at random. RUN may be a Hugging Face folder or a GGUF file. `napkin
    tune distill --tuning.start PRUNED --distillation.teacher RUN` brings back much of what is lost."""

    n_layers: int | None = None
    """Layers to keep; None keeps all."""
    n_kv_heads: int | None = None
    """Heads of keys and values to keep in each layer, each with the query heads that read it."""
    d_ff: int | None = None
    """Hidden units to keep in each feed-forward layer."""
    d_model: int | None = None
    """Channels of the residual stream to keep."""
    by: Literal["activation", "taylor"] = "activation"
    """Importance of heads, units and channels: the size of what a head or unit writes, and of what is read of a
    channel; or what the loss would change by without it, by its gradient. That of layers is how far each turns the
    residual stream."""
    calibration_tokens: int = 16_384
    """Tokens on which importance is measured, in windows drawn from the text."""
    calibration_text: tuple[str, ...] = ()
    """Text files or folders to calibrate on; None is the run's training tokens."""
    evaluation_text: tuple[str, ...] = ()
    """Text files or folders on which bits per byte are measured; None is the run's validation tokens."""
    evaluation_tokens: int = 20_000
    """Number of evaluation tokens, about, drawn at random; 0 evaluates nothing."""
    window: int = 512
    """Tokens that are read at a time for both, at most the model's context."""
    seed: int = 0
    """Draws the windows, and the parts that are kept at random for comparison."""
    out: str | None = None
    """Folder to write; it must not exist. None is the run's name with -pruned."""


@command("prune", PruneOptions)
def prune_command(options: PruneOptions) -> None:
    if options.evaluation_tokens < 0:
        raise NapkinError(f"--evaluation-tokens is {options.evaluation_tokens}: use 0 or more")
    require_calibration_tokens(options.calibration_tokens)
    if options.window < 2:
        raise NapkinError(f"--window is {options.window}: use 2 or more, a token has to follow another")
    run = Path(options.run)
    out = run.with_name(f"{run.resolve().name.removesuffix('.gguf')}-pruned")
    out = out if options.out is None else Path(options.out)
    refuse_existing(out)
    with progress_line("opening the model") as line:
        from napkin.inference.loaded_model import load
        from napkin.model.pruning import (
            PrunedSizes,
            drawn_parts,
            measure_importance,
            most_important,
            remove_parts,
        )

        trained = load(run, weights="fp32", on_message=notify)
        if trained.quantized is not None:
            raise NapkinError(f"'{run}' is quantized: name the run that it was made of, '{trained.quantized.source}'")
        sizes = PrunedSizes(options.n_layers, options.n_kv_heads, options.d_ff, options.d_model)
        drawn = drawn_parts(trained.config, sizes, options.seed)
        _require_writable(trained, drawn)
        windows = calibration_windows(
            trained, options.calibration_text, options.calibration_tokens, options.window, options.seed
        )
        documents = _held_out(trained, options)
        model = trained.model
        line.retitle("measuring importance")
        importance = measure_importance(
            model,
            [each.to(model.device) for each in windows.split(max(1, 4096 // windows.shape[1]))],
            options.by,
            progress=lambda done, total: line(done, total, f"{done:,}/{total:,} batches"),
        )
        kept = most_important(importance, trained.config, sizes)
        smaller = trained.with_model(remove_parts(model, kept))
        line.retitle("counting")
        before, after = _figures(trained.config), _figures(smaller.config)
        line.retitle("evaluating")
        measured: dict[str, SampledBits] = {}
        if documents is not None:
            measured = {"before": _bits(trained, documents, options), "after": _bits(smaller, documents, options)}
            at_random = trained.with_model(remove_parts(model, drawn))
            measured["random"] = _bits(at_random, documents, options)
    if not options.json:
        _say(before, after, measured)
        if documents is None:
            notify("bits per byte are not measured: name a text that the model was not trained on, --evaluation-text")
    with folder_for(out):
        smaller.export(out)
    size = sum(path.stat().st_size for path in out.iterdir())
    if options.json:
        bits = {
            name: {"bits_per_byte": each.bits_per_byte, "standard_error": each.standard_error}
            for name, each in measured.items()
        }
        tokens = measured["after"].tokens if measured else 0
        print_json(
            {"folder": out, "bytes": size, "before": before, "after": after, "bits": bits, "tokens": tokens}
            | {"kept": dataclasses.asdict(kept), "calibration_tokens": windows.numel()}
        )
        return
    say(f"wrote {out}: {format_bytes(size)}, layers {_ranges(kept.layers)} of {trained.config.n_layers}")


def _require_writable(trained: "LoadedModel", kept: "Kept") -> None:
    """Raise NapkinError, before anything is computed, if the Hugging Face format has no such model or tokenizer."""
    from napkin.model.huggingface.convert import family_of
    from napkin.model.pruning import pruned_config
    from napkin.tokenizer.inspection import pattern_of

    pattern_of(trained.tokenizer)
    family_of(pruned_config(trained.config, kept))


def _held_out(trained: "LoadedModel", options: PruneOptions) -> "Documents | None":
    """The text on which bits per byte are measured, in pieces; None where there is none, or none is wanted."""
    from napkin.cli.evaluate.text import documents_for
    from napkin.evaluation.text_windows import cut_documents

    has_text = options.evaluation_text or (trained.run_folder is not None and trained.run.validation_tokens)
    if not options.evaluation_tokens or not has_text:
        return None
    _, documents = documents_for(
        trained, options.evaluation_text, way_out="name a text with --evaluation-text, or use --evaluation-tokens 0"
    )
    first = len(trained.document_ids)
    return cut_documents(documents, max(1, min(options.window, trained.context_length) - first))


def _bits(model: "LoadedModel", documents: "Documents", options: PruneOptions) -> "SampledBits":
    from napkin.evaluation.text_windows import sampled_bits

    return sampled_bits(
        model.model,
        documents,
        model.tokenizer,
        tuple(model.document_ids),
        max_tokens=options.evaluation_tokens,
        seed=options.seed,
        device=model.model.device,
    )


def _figures(config: "ModelConfig") -> dict[str, int]:
    """Bytes and FLOPs of a model, planned by counting its forward pass on fake tensors."""
    from napkin.planning.services.replica import count_forward

    cached = config.context_length // 2
    ledger = count_forward(config, 1, cached)
    return {
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "n_kv_heads": config.resolved_n_kv_heads,
        "d_ff": config.resolved_d_ff,
        "d_model": config.d_model,
        "parameters": ledger.parameters,
        "weight_bytes": 4 * ledger.parameters,
        "cache_bytes_per_token": 4 * config.cached_numbers,
        "flops_per_token": ledger.flops,
        "tokens_in_cache": cached,
    }


def _say(before: dict[str, int], after: dict[str, int], measured: "dict[str, SampledBits]") -> None:
    """Print sizes, what they take, and bits per byte, before and after."""

    def row(title: str, name: str, shown: Any = str) -> tuple[str, str, str, str]:
        return title, shown(before[name]), shown(after[name]), f"{after[name] / max(before[name], 1):.1%}"

    sizes = ("n_layers", "n_heads", "n_kv_heads", "d_ff", "d_model")
    rows = [row(name, name) for name in sizes if before[name] != after[name]]
    rows += [
        row("parameters", "parameters", format_count),
        row("weights in fp32", "weight_bytes", format_bytes),
        row("cache of a token in fp32", "cache_bytes_per_token", format_bytes),
        row(f"FLOPs of a token after {before['tokens_in_cache']:,}", "flops_per_token", format_flops),
    ]
    if measured:
        first, last, drawn = (measured[name] for name in ("before", "after", "random"))
        title = f"bits per byte, {first.tokens:,} tokens"
        change = f"+{last.bits_per_byte - first.bits_per_byte:.4f}"
        rows.append((title, f"{first.bits_per_byte:.4f}", f"{last.bits_per_byte:.4f}", change.replace("+-", "-")))
        rows.append(("the same, parts kept at random", "", f"{drawn.bits_per_byte:.4f}", ""))
    print_table(("", "before", "after", ""), rows, align="lrrr")


def _ranges(numbers: tuple[int, ...]) -> str:
    """Ascending numbers, neighbours joined: 0-3, 7."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, each)) for each in ranges)
