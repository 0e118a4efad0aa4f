"""`napkin evaluate`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from napkin.cli.common.files import renew_report
from napkin.cli.common.options import INLINED, JsonOption, parse, takes
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.cli.evaluate.bits import BitsOptions, evaluate_bits
from napkin.cli.evaluate.tasks import TaskOptions, evaluate_task
from napkin.errors import NapkinError
from napkin.units import format_bytes

if TYPE_CHECKING:
    from napkin.runs.accounting_files import Evaluation


@dataclass(frozen=True)
class EvaluateOptions(JsonOption):
    """Predict all validation tokens of a run: loss, perplexity, bits per byte, beside gzip and xz on the same bytes; or
    those of a sample of any text; or put a task to the model of a run or a Hugging Face folder."""

    run: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = None
    """Folder of the run; with --text or --task a Hugging Face folder, too."""
    tokens: str | None = None
    """Token file to predict; None is the run's validation file, whose result is kept in the run folder and report."""
    bits: Annotated[BitsOptions, INLINED] = field(default_factory=BitsOptions)
    tasks: Annotated[TaskOptions, INLINED] = field(default_factory=TaskOptions)


@takes(EvaluateOptions)
def main(arguments: Sequence[str]) -> None:
    """Evaluate a run and write the result to its folder."""
    options = parse(EvaluateOptions, "evaluate", arguments)
    if options.tasks.compare:
        from napkin.cli.evaluate.compare import compare

        if options.run is not None or options.tasks.task:
            raise NapkinError("--compare reads two results: leave out RUN and --task")
        compare(options.tasks.compare, options.tasks.score, json=options.json)
        return
    if options.run is None:
        raise NapkinError("missing from napkin evaluate: RUN Folder of the run: `napkin evaluate --help` tells more")
    if "--task" in arguments and not options.tasks.task:
        raise NapkinError("--task names no file: give a task file, or a folder of them")
    if options.tasks.task:
        if options.tokens is not None or options.bits.wanted:
            given = "--tokens" if options.tokens is not None else "--text, --stride, --error or --max-tokens"
            raise NapkinError(f"{given} and --task are two evaluations: use one of them")
        evaluate_task(options.run, options.tasks, json=options.json)
        return
    if options.bits.wanted:
        evaluate_bits(options.run, options.bits, options.tokens, options.tasks, json=options.json)
        return
    if options.tasks.plan:
        raise NapkinError("--plan is of a task or of a sample: name a --task, or give --error or --max-tokens")
    _evaluate_tokens(options, options.run)


def _evaluate_tokens(options: EvaluateOptions, run: str) -> None:
    with progress_line("opening the run") as line:
        from napkin.inference.loaded_model import load

        trained = load(run, on_message=notify)
        path = trained.run.validation_tokens if options.tokens is None else options.tokens
        if path is None:
            raise NapkinError(f"'{run}' has no validation tokens: name a token file with --tokens")
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
        _describe(path, evaluation)
    if options.tokens is None:
        renew_report(trained.run.path)


def _describe(path: str, evaluation: "Evaluation") -> None:
    say(
        f"{path}: {evaluation.tokens:,} tokens, {format_bytes(evaluation.bytes)}; step {evaluation.step:,}: "
        f"loss {evaluation.loss:.4f} nats per token, perplexity {_perplexity(evaluation.perplexity)}"
    )
    rows = [
        ("gzip -9", f"{evaluation.gzip_bits_per_byte:.4f}"),
        ("this model", f"{evaluation.bits_per_byte:.4f}"),
        ("xz -9", f"{evaluation.xz_bits_per_byte:.4f}"),
    ]
    print_table(("", "bits per byte"), rows)


def _perplexity(value: float) -> str:
    # That of a run that diverged may have hundreds of digits.
    return f"{value:.2f}" if value < 1e6 else f"{value:.3g}"
