"""`napkin evaluate RUN` predicts its validation tokens, `napkin evaluate text` estimates from a sample of any text.

Bits per byte stand beside those of gzip and xz on the same bytes.
"""

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napkin.cli.common.files import folder_for, refuse_existing, renew_report
from napkin.cli.common.options import RunOptions, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.cli.evaluate.tasks import ModelOptions, result_path
from napkin.errors import NapkinError
from napkin.files import atomic_write_text
from napkin.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from napkin.evaluation.bits_per_byte import BitsResult
    from napkin.evaluation.text_windows import Documents, SampledBits
    from napkin.inference.loaded_model import LoadedModel
    from napkin.runs.accounting_files import Evaluation


@dataclass(frozen=True)
class EvaluateOptions(RunOptions):
    """Predict all validation tokens of a run: loss, perplexity, bits per byte, beside gzip and xz on the same bytes.
    Other evaluations, with options of their own: a sample of any text, napkin evaluate text RUN --text FILE; the
    questions of a task, napkin evaluate task RUN --task FILE; two results, napkin evaluate compare A.json B.json."""

    tokens: str | None = None
    """Token file to predict; None is the run's validation file, whose result is kept in the run folder and report."""


@command("evaluate", EvaluateOptions)
def evaluate_tokens(options: EvaluateOptions) -> None:
    with progress_line("opening the run") as line:
        from napkin.inference.loaded_model import load

        trained = load(options.run, on_message=notify)
        path = trained.run.validation_tokens if options.tokens is None else options.tokens
        if path is None:
            raise NapkinError(f"'{options.run}' has no validation tokens: name a token file with --tokens")
        if not Path(path).is_file():
            raise NapkinError(f"there is no token file '{path}': name one with --tokens")
        line.retitle("evaluating")
        evaluation = trained.evaluate(
            path, progress=lambda done, total: line(done, total, f"{done:,} of {total:,} tokens")
        )
        if options.tokens is None:
            trained.run.write_json("evaluation.json", evaluation)
    if options.json:
        print_json(evaluation)
    else:
        # The perplexity of a run that diverged may have hundreds of digits.
        perplexity = f"{evaluation.perplexity:{'.2f' if evaluation.perplexity < 1e6 else '.3g'}}"
        say(
            f"{path}: {evaluation.tokens:,} tokens, {format_bytes(evaluation.bytes)}; step {evaluation.step:,}: "
            f"loss {evaluation.loss:.4f} nats per token, perplexity {perplexity}"
        )
        print_table(("", "bits per byte"), _beside_compressors(evaluation))
    if options.tokens is None:
        renew_report(trained.run.path)


def _beside_compressors(found: "Evaluation | SampledBits") -> list[tuple[str, str]]:
    bits = {
        "gzip -9": found.gzip_bits_per_byte,
        "this model": found.bits_per_byte,
        "xz -9": found.xz_bits_per_byte,
    }
    ngrams = getattr(found, "ngram_bits_per_byte", None)
    named = {"n-grams": ngrams} if ngrams is not None else {}
    return [(name, f"{value:.4f}") for name, value in (named | bits).items()]


@dataclass(frozen=True)
class TextOptions(ModelOptions):
    """Score windows of a text, all or as many drawn at random as the error needs: bits per byte with a 95% interval,
    beside gzip and xz. RUN may be a Hugging Face folder. Without --text and --tokens, the text is the run's validation
    tokens."""

    text: tuple[str, ...] = ()
    """Text files or folders, instead of a token file: any tokenizer, bytes of the text itself."""
    tokens: str | None = None
    """Token file instead of a text."""
    stride: int | None = None
    """Tokens from one window to the next, in which as many are scored; None is half the context."""
    error: float | None = None
    """Score windows drawn at random until the standard error is so many bits per byte, such as 0.01."""
    ngrams: str | None = None
    """A model of n-grams that napkin evaluate ngrams has written, as a baseline on the same bytes."""
    max_tokens: int | None = None
    """Score about so many tokens at most, drawn at random."""


@command("evaluate text", TextOptions)
def evaluate_text(options: TextOptions) -> None:
    if options.text and options.tokens is not None:
        raise NapkinError("--text and --tokens are two texts: name one of them")
    path = None if options.out is None else Path(options.out)
    if path is not None:
        refuse_existing(path)
    with progress_line("opening the model") as line:
        from napkin.evaluation.bits_per_byte import bits_result
        from napkin.evaluation.ngrams import NgramModel
        from napkin.evaluation.tasks.results import versions
        from napkin.evaluation.text_windows import sampled_bits
        from napkin.inference.loaded_model import load

        model = load(options.run, weights=options.weights, on_message=notify)
        line.retitle("reading the text")
        name, documents = documents_for(model, options.text, options.tokens)
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
            seed=options.seed or 0,
            device=model.model.device,
            ngrams=None if options.ngrams is None else NgramModel.load(options.ngrams),
        )
        if options.plan:
            plan = _plan(measure, options)
            dollars = "" if plan["usd"] is None else f", ${plan['usd']:.3g}"
            if options.json:
                print_json(plan)
                return
            say(
                f"{name}: about {plan['windows']:,} of {plan['all_windows']:,} windows, "
                f"{format_count(plan['tokens'])} tokens; about {format_seconds(plan['seconds'])}{dollars}, by "
                f"{plan['timed_windows']:,} windows, timed here"
            )
            return
        found = measure(
            progress=lambda done, total, error: line(
                done, total if options.error is None else None, f"{done:,} of {total:,} windows  ± {error:.4f}"
            ),
        )
    result = bits_result(found, {"name": name, "sha256": documents.sha256}, model.about(), versions())
    path = _write(options.run, path, result)
    if options.json:
        print_json(result)
    else:
        _say(name, found, path)


def _plan(measure: Any, options: TextOptions) -> dict[str, Any]:
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
        "usd": None if options.usd_per_hour is None else seconds / 3600 * options.usd_per_hour,
        "timed_windows": pilot.windows,
    }


def documents_for(
    model: "LoadedModel",
    texts: Sequence[str],
    tokens: str | None = None,
    *,
    way_out: str = "name a text with --text, or a token file with --tokens",
) -> "tuple[str, Documents]":
    """The name and the documents of a text, of a token file, or of a run's validation tokens where neither is named.

    Raises NapkinError where there is none of them.
    """
    from napkin.data.corpus import read_documents
    from napkin.data.token_file import TokenFile
    from napkin.evaluation.text_windows import documents_of_texts, documents_of_tokens

    tokenizer = model.tokenizer
    if texts:
        return " ".join(texts), documents_of_texts([document.text for document in read_documents(texts)], tokenizer)
    if tokens is None and model.run_folder is not None:
        tokens = model.run.validation_tokens
    if tokens is None:
        raise NapkinError(f"'{model.folder}' has no validation tokens: {way_out}")
    if not Path(tokens).is_file():
        raise NapkinError(f"there is no token file '{tokens}': {way_out}")
    token_file = TokenFile.open(tokens, tokenizer_fingerprint=tokenizer.fingerprint, verify=True, in_memory=True)
    token_file.refuse_other_vocabulary(tokenizer)
    return tokens, documents_of_tokens(token_file, tokenizer)


def _write(folder: str, path: Path | None, result: "BitsResult") -> Path | None:
    """Write to the run's folder by default, under a name made of the settings, so that repeating a measurement replaces
    it."""
    from napkin.json_files import format_json

    bits, given = result.bits, path is not None
    settings = (result.text, result.model, result.made_with, bits.stride, bits.seed, bits.windows)
    path = path or result_path(folder, "bits-per-byte", settings)
    if path is not None:
        with folder_for(path):
            atomic_write_text(path, format_json(result), overwrite=not given)
    return path


def _say(name: str, found: "SampledBits", path: Path | None) -> None:
    share = "all" if found.windows == found.all_windows else f"{found.windows:,} of {found.all_windows:,}"
    say(
        f"{name}: {format_count(found.tokens)} of {format_count(found.all_tokens)} tokens, "
        f"{format_bytes(found.bytes)}; {share} windows of {found.context_length:,} tokens, stride {found.stride:,}, "
        "each document by itself"
    )
    interval = "all of it"
    if found.windows < found.all_windows:
        interval = f"± {found.standard_error:.4f}, {found.low:.4f} to {found.high:.4f}"
    rows = [(*row, interval if row[0] == "this model" else "") for row in _beside_compressors(found)]
    print_table(("", "bits per byte", "± s.e., 95% interval"), rows)
    if found.windows < found.all_windows:
        say("The interval is for this text; compressors got the scored bytes as one stream.")
    if path is not None:
        say(f"written to {path}", wrap=False)
