"""`napkin export` writes a Hugging Face folder, `napkin quantize` a model of 8 or 4 bits."""

import copy
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from napkin.cli.common.files import folder_for, refuse_existing
from napkin.cli.common.options import RunOptions, Switch, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.cli.models.calibration_text import calibration_windows, require_calibration_tokens
from napkin.errors import NapkinError
from napkin.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from napkin.cli.common.progress import ProgressLine
    from napkin.inference.loaded_model import LoadedModel
    from napkin.model.calibration import CalibratedLayer
    from napkin.model.gguf.convert import GgufFormat


@dataclass(frozen=True)
class ExportOptions(RunOptions):
    """Write a run's newest good model and its tokenizer as a Hugging Face folder, which `transformers` reads: it gives
    the same logits, and the same text up to the model's context length; or as a GGUF file, which llama.cpp and Ollama
    read. A model or a tokenizer that cannot be represented exactly is refused."""

    out: str = ""
    """Folder to write, or a GGUF file where the name ends with .gguf; required. It must not exist."""
    to: Literal["f32", "f16", "bf16", "q8_0", "q4_0"] = "f16"
    """Number format of the matrices in a GGUF file."""
    weights_only: Switch = False
    """Leave out the tokenizer, which has to be a byte-level BPE."""
    adapter: Switch = False
    """Write only the adapters of a run of tuning, as peft reads them, for the model that it started from; otherwise
    they are merged."""


@command("export", ExportOptions)
def export_command(options: ExportOptions) -> None:
    if not options.out:
        raise NapkinError("no folder to write is named: give --out FOLDER")
    out = Path(options.out)
    refuse_existing(out)
    with progress_line("opening the run") as line:
        from napkin.inference.loaded_model import load
        from napkin.model.huggingface.folder_files import is_huggingface
        from napkin.recipe.tuning_recipe import TuningRecipe

        model = load(options.run, on_message=notify)
        line.retitle("writing")
        with folder_for(out):
            model.export(
                out,
                weights_only=options.weights_only,
                adapter=options.adapter,
                to=cast("GgufFormat", options.to.upper()),
            )
    if options.adapter and isinstance(recipe := model.recipe, TuningRecipe):
        base = recipe.tuning.start
        if not Path(base).is_dir():
            notify(f"'{base}' is not there: they are for a folder that `napkin export` has written of the same weights")
        elif not is_huggingface(base):
            notify(f"they are for the folder that `napkin export {shlex.quote(base)}` writes")
    written = [out] if out.is_file() else sorted(out.iterdir())
    files = {path.name: path.stat().st_size for path in written}
    if options.json:
        print_json({"folder": out, "step": model.step, "files": files})
        return
    say(f"wrote {out}: step {model.step:,}, {format_bytes(sum(files.values()))} in {', '.join(files)}")


@dataclass(frozen=True)
class QuantizeOptions(RunOptions):
    """Write a run's newest model with weights of 8 or 4 bits to a new folder, which `napkin generate` and `evaluate`
    read. Before it is written, it is said what that costs in bits per byte."""

    to: Literal["int8", "int4"] = "int4"
    """int8 has one scale per row of a matrix; int4 a scale and a middle per group."""
    method: Literal["nearest", "gptq", "awq"] = "nearest"
    """How int4 numbers are chosen: round to nearest, or by each layer's inputs on a text: GPTQ compensates each
    rounding error in the columns that are not rounded yet, AWQ rounds the columns with large inputs more finely."""
    calibration_tokens: int = 16_384
    """Tokens of the calibration text, in windows of the model's context drawn from it."""
    calibration_text: tuple[str, ...] = ()
    """Text files or folders that gptq and awq look at; None is the run's training tokens."""
    group_size: int = 64
    """Numbers of a row that share a scale in int4."""
    out: str | None = None
    """Folder to write; it must not exist. None is the run's name with -int8 or -int4."""
    evaluation_tokens: int = 20_000
    """Validation tokens, from the first, on which bits per byte are measured; 0 is none."""


@command("quantize", QuantizeOptions)
def quantize_command(options: QuantizeOptions) -> None:
    if options.evaluation_tokens < 0:
        raise NapkinError(f"--evaluation-tokens is {options.evaluation_tokens}: use 0 or more")
    if options.method != "nearest" and options.to != "int4":
        raise NapkinError(f"--method {options.method} is of int4: leave it out, or use --to int4")
    require_calibration_tokens(options.calibration_tokens)
    run, calibrates = Path(options.run), options.method != "nearest"
    kind = f"{options.to}-{options.method}" if calibrates else options.to
    out = run.with_name(f"{run.resolve().name}-{kind}") if options.out is None else Path(options.out)
    refuse_existing(out)
    with progress_line("opening the run") as line:
        from napkin.inference.loaded_model import load
        from napkin.inference.quantized_run import write_quantized
        from napkin.model.quantized import quantize_model
        from napkin.runs.run_folder import QuantizedRun, read_conversation

        trained = load(run, on_message=notify)
        if trained.quantized is not None:
            raise NapkinError(f"'{run}' is quantized already: name the run that it was made of")
        recipe = trained.recipe
        line.retitle("evaluating")
        before, n_tokens = _bits_per_byte(trained, options.evaluation_tokens)
        line.retitle("quantizing")
        model = copy.deepcopy(trained.model).to("cpu")
        begin = time.perf_counter()
        layers = _calibrated(trained, options, line)
        quantize_model(
            model,
            options.to,
            group_size=options.group_size,
            calibrated={name: each.tensors for name, each in layers.items()},
        )
        seconds = time.perf_counter() - begin
        line.retitle("evaluating")
        after, _ = _bits_per_byte(
            trained.with_model(model.to(trained.precision.device_type)), options.evaluation_tokens
        )
    if not options.json:
        rows = [
            (
                name,
                format_bytes(sum(tensor.nbytes for tensor in each.state_dict().values())),
                f"{bits:.4f}" if n_tokens else "no text",
            )
            for name, each, bits in (("this run", trained.model, before), (kind, model, after))
        ]
        print_table(("", "weights", "bits per byte"), rows)
        if layers:
            n = len(layers)
            error, nearest = (sum(getattr(x, at) for x in layers.values()) / n for at in ("error", "rounding_error"))
            say(
                f"{options.method} in {format_seconds(seconds)}: products of {n:,} matrices differ by {error:.3g} of "
                f"their squares on the calibration text, by {nearest:.3g} if rounded to the nearest"
            )
    about = QuantizedRun(
        "napkin-quantized", 1, options.to, options.group_size, trained.step, str(run), n_tokens, after, before, {}
    )
    conversation = read_conversation(trained.run.path, trained.tokenizer)
    with folder_for(out):
        size = write_quantized(out, model.to("cpu"), recipe, trained.tokenizer, about, conversation)
    if options.json:
        print_json(
            {"folder": out, "bytes": size, "tokens": n_tokens, "bits_per_byte": after, "original_bits_per_byte": before}
            | {"method": options.method, "seconds": seconds}
        )
        return
    loss = f"{100 * (after / before - 1):+.2f}% bits per byte on {n_tokens:,} tokens" if n_tokens else "not measured"
    say(f"wrote {out}: {kind}, {format_bytes(size)}; {loss}")


def _calibrated(trained: "LoadedModel", options: QuantizeOptions, line: "ProgressLine") -> "dict[str, CalibratedLayer]":
    """The tensors of matrices by GPTQ or AWQ, on windows of a text, in fp32."""
    from napkin.model.calibration import calibrate

    if options.method == "nearest":
        return {}
    windows = calibration_windows(trained, options.calibration_text, options.calibration_tokens)
    line.retitle("calibrating")
    model = copy.deepcopy(trained.model).to("cpu").float()
    return calibrate(
        model,
        list(windows.split(max(1, 4096 // windows.shape[1]))),
        options.method,
        group_size=options.group_size,
        progress=lambda done, total: line(done, total, f"{done:,}/{total:,} blocks"),
    )


def _bits_per_byte(trained: "LoadedModel", max_tokens: int) -> tuple[float, int]:
    if not max_tokens or trained.run.validation_tokens is None:
        return 0.0, 0
    return trained.sampled_bits_per_byte(max_tokens)
