"""`napkin evaluate RUN --text FILE --error 0.01`: bits per byte, from as large a sample as the error needs."""

import functools
import hashlib
import json as json_text
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napkin.cli.common.files import folder_for, refuse_existing
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.cli.evaluate.tasks import TaskOptions
from napkin.errors import NapkinError
from napkin.files import atomic_write_text
from napkin.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from napkin.evaluation.bits_per_byte import BitsResult
    from napkin.evaluation.text_windows import Documents, SampledBits
    from napkin.inference.loaded_model import LoadedModel


@dataclass(frozen=True)
class BitsOptions:
    """Bits per byte of a sample of a text."""

    text: tuple[str, ...] = ()
    """Text files or folders, instead of a token file: any tokenizer, bytes of the text itself."""
    stride: int | None = None
    """Tokens from one window to the next, in which as many are scored; None is half the context."""
    error: float | None = None
    """Score windows drawn at random until the standard error is so many bits per byte, such as 0.01."""
    max_tokens: int | None = None
    """Score about so many tokens at most, drawn at random."""

    @property
    def wanted(self) -> bool:
        """Whether any of them is given."""
        return bool(self.text) or any(each is not None for each in (self.stride, self.error, self.max_tokens))


def evaluate_bits(folder: str, options: BitsOptions, tokens: str | None, tasks: TaskOptions, *, json: bool) -> None:
    """Measure, print and write the result; of `tasks` what both kinds of evaluation have."""
    if options.text and tokens is not None:
        raise NapkinError("--text and --tokens are two texts: name one of them")
    path = None if tasks.out is None else Path(tasks.out)
    if path is not None:
        refuse_existing(path)
    with progress_line("opening the model") as line:
        from napkin.evaluation.bits_per_byte import bits_result
        from napkin.evaluation.tasks.results import versions
        from napkin.evaluation.text_windows import sampled_bits
        from napkin.inference.loaded_model import load

        model = load(folder, weights=tasks.weights, on_message=notify)
        line.retitle("reading the text")
        name, documents = _documents(folder, options, tokens, model)
        line.retitle("scoring windows")
        measure = functools.partial(
            sampled_bits,
            model.model,
            documents,
            model.tokenizer,
            tuple(model.document_ids),
            stride=options.stride,
            error=options.error,
            max_tokens=options.max_tokens,
            seed=tasks.seed or 0,
            device=model.model.head_weight.device,
        )
        if tasks.plan:
            told = _plan(measure, options, tasks.usd_per_hour)
            print_json(told) if json else _say_plan(name, told)
            return
        found = measure(
            progress=lambda done, total, error: line(
                done, total if options.error is None else None, f"{done:,} of {total:,} windows  ± {error:.4f}"
            ),
        )
    result = bits_result(found, {"name": name, "sha256": documents.sha256}, model.about(), versions())
    path = _write(folder, path, result)
    if json:
        print_json(result)
    else:
        _say(name, found, path)


def _plan(measure: Any, options: BitsOptions, usd_per_hour: float | None) -> dict[str, Any]:
    """Time a pilot, and tell from its spread how many windows the error takes."""
    from napkin.evaluation.text_windows import LEAST_WINDOWS, windows_for

    begin = time.perf_counter()
    pilot = measure(error=None, max_tokens=None, max_windows=LEAST_WINDOWS)
    seconds = time.perf_counter() - begin
    windows = windows_for(pilot, error=options.error, max_tokens=options.max_tokens)
    seconds *= windows / pilot.windows
    return {
        "windows": windows,
        "all_windows": pilot.all_windows,
        "tokens": round(windows * pilot.tokens / pilot.windows),
        "all_tokens": pilot.all_tokens,
        "seconds": seconds,
        "usd": None if usd_per_hour is None else seconds / 3600 * usd_per_hour,
        "timed_windows": pilot.windows,
    }


def _say_plan(name: str, told: dict[str, Any]) -> None:
    dollars = "" if told["usd"] is None else f", ${told['usd']:.3g}"
    say(
        f"{name}: about {told['windows']:,} of {told['all_windows']:,} windows, {format_count(told['tokens'])} tokens; "
        f"about {format_seconds(told['seconds'])}{dollars}, by {told['timed_windows']:,} windows, timed here"
    )


def _documents(folder: str, options: BitsOptions, tokens: str | None, model: "LoadedModel") -> "tuple[str, Documents]":
    from napkin.data.corpus import read_documents
    from napkin.data.token_file import TokenFile
    from napkin.evaluation.text_windows import documents_of_texts, documents_of_tokens
    from napkin.runs.run_folder import RunFolder, is_run

    tokenizer = model.tokenizer
    if options.text:
        texts = [document.text for document in read_documents(options.text)]
        return " ".join(options.text), documents_of_texts(texts, tokenizer)
    if tokens is None and is_run(Path(folder)):
        tokens = RunFolder.open(folder).validation_tokens
    if tokens is None:
        raise NapkinError(
            f"'{folder}' has no validation tokens: name a text with --text, or a token file with --tokens"
        )
    if not Path(tokens).is_file():
        raise NapkinError(f"there is no token file '{tokens}': name one with --tokens")
    token_file = TokenFile.open(tokens, tokenizer_fingerprint=tokenizer.fingerprint, verify=True, in_memory=True)
    token_file.refuse_other_vocabulary(tokenizer)
    return tokens, documents_of_tokens(token_file, tokenizer)


def _write(folder: str, path: Path | None, result: "BitsResult") -> Path | None:
    """To the run's folder by default, named by what it is of: the same measurement replaces itself."""
    from napkin.json_files import format_json, write_json
    from napkin.runs.run_folder import is_run

    if path is not None:
        with folder_for(path):
            atomic_write_text(path, format_json(result))
        return path
    if not is_run(Path(folder)):
        return None
    bits = result.bits
    of: Any = (result.text, result.model, result.made_with, bits.stride, bits.seed, bits.windows)
    key = hashlib.sha256(json_text.dumps(of, sort_keys=True).encode()).hexdigest()[:8]
    path = Path(folder) / "evaluations" / f"bits-per-byte-{key}.json"
    with folder_for(path):
        write_json(path, result)
    return path


def _say(name: str, found: "SampledBits", path: Path | None) -> None:
    share = "all" if found.windows == found.all_windows else f"{found.windows:,} of {found.all_windows:,}"
    say(
        f"{name}: {format_count(found.tokens)} of {format_count(found.all_tokens)} tokens, "
        f"{format_bytes(found.bytes)}; {share} windows of {found.context_length:,} tokens, stride {found.stride:,}, "
        "each document by itself"
    )
    rows = [
        ("gzip -9", f"{found.gzip_bits_per_byte:.4f}", ""),
        ("this model", f"{found.bits_per_byte:.4f}", _interval(found)),
        ("xz -9", f"{found.xz_bits_per_byte:.4f}", ""),
    ]
    print_table(("", "bits per byte", "± s.e., 95% interval"), rows)
    if found.windows < found.all_windows:
        say("The interval is for this text; compressors got the scored bytes as one stream.")
    if path is not None:
        say(f"written to {path}", wrap=False)


def _interval(found: "SampledBits") -> str:
    if found.windows == found.all_windows:
        return "all of it"
    return f"± {found.standard_error:.4f}, {found.low:.4f} to {found.high:.4f}"
