"""`napkin evaluate task RUN --task FILE`: questions put to a model, with their plan, and what they can tell apart."""

import hashlib
import json as json_text
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from napkin.cli.common.files import folder_for, refuse_existing
from napkin.cli.common.options import JsonOption, Switch, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.errors import NapkinError
from napkin.units import format_count, format_seconds

if TYPE_CHECKING:
    from napkin.environments.tool_answers import ToolAnswers
    from napkin.evaluation.calibration import Calibration
    from napkin.evaluation.tasks.prompts import Prompting
    from napkin.evaluation.tasks.published import Task
    from napkin.evaluation.tasks.results import ItemLog, TaskResult
    from napkin.evaluation.tasks.running import TaskModel, TaskPlan
    from napkin.evaluation.uncertainty import Estimate
    from napkin.inference.loaded_model import LoadedModel


TIMED_ITEMS = 8
DISAGREEMENTS = (0.2, 0.5)
"""Shares of items on which two models may differ: relatives, and strangers at half right."""


@dataclass(frozen=True)
class ModelOptions(JsonOption):
    """Options of evaluations of any model, which have a plan and keep their result."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of a run, or a Hugging Face folder."""
    seed: int | None = None
    """Draws the examples, the items of --limit, and windows of a text; None takes the first examples of the dev
    file."""
    weights: Literal["auto", "fp32", "bf16"] = "fp32"
    """Number format of the weights; auto is bf16 where the device multiplies it natively."""
    plan: Switch = False
    """Print how long the evaluation takes, timed on a part of it, and what its items can tell apart, and stop there."""
    usd_per_hour: float | None = None
    """Price of this machine, for the plan."""
    out: str | None = None
    """JSON file of the result; None is in the run's folder."""

    def __post_init__(self) -> None:
        if self.usd_per_hour is not None and not 0 < self.usd_per_hour < 1e9:
            raise NapkinError(f"--usd-per-hour is {self.usd_per_hour}: use a number above 0")


@dataclass(frozen=True)
class TaskOptions(ModelOptions):
    """Put the questions of a task to the model of a run or a Hugging Face folder: scores with their standard errors,
    and what so many items can tell apart. Finished items are kept beside the result, and are not computed again."""

    task: tuple[str, ...] = ()
    """Task files (JSONL, CSV or TOML), or folders of them: multiple choice, minimal pairs, or answers that the model
    writes. Several are sections of one task."""
    dev: tuple[str, ...] = ()
    """Files of items that examples are taken from."""
    shots: int = 0
    """Examples before each question."""
    limit: int | None = None
    """Items of a random sample; None is all."""
    chat: Switch = False
    """Put questions and examples in the model's chat template."""
    tools: str = ""
    """Programs that the model may call before it answers, with --chat: python, calculator, or both with a comma. The
    plan leaves out the turns that they add."""
    unconditional: Switch = False
    """Score choices without their question too: acc_uncond, as Brown et al. 2020 normalise."""
    answer_tokens: int | None = None
    """Tokens of a generated answer, at most; None is what the task says, or 256."""
    score: str | None = None
    """The score that leads: acc, acc_norm (per character), acc_bytes, acc_tokens, acc_uncond, exact_match."""
    calibration: Switch = False
    """Print how often choices of each confidence are right."""
    skip_bad: Switch = False
    """Leave out items that cannot be scored, and say which."""


@command("evaluate task", TaskOptions)
def evaluate_task(options: TaskOptions) -> None:
    if not options.task:
        raise NapkinError("--task names no file: give a task file, or a folder of them")
    task, prompting = _task(options)
    with progress_line("opening the model") as line:
        from napkin.evaluation.tasks.results import settings_of
        from napkin.evaluation.tasks.running import fitting_items, plan_task
        from napkin.inference.loaded_model import load

        model: TaskModel = load(options.run, weights=options.weights, on_message=notify)
        if options.tools:
            model = _with_tools(model, options.tools)
        task = fitting_items(task, model, prompting, skip_bad=options.skip_bad)
        settings = settings_of(task, model.about(), prompting)
        safe = "".join(each if each.isalnum() or each in "-_." else "-" for each in task.name)[:80]
        path = result_path(options.run, safe, settings) if options.out is None else Path(options.out)
        if path is not None and path.exists() and not log_of(path).exists():
            refuse_existing(path)
        line.retitle("counting the tokens")
        plan = plan_task(task, model, prompting, timed_items=TIMED_ITEMS if options.plan else 0, progress=line)
    from napkin.evaluation.uncertainty import detectable_difference

    price, seconds = options.usd_per_hour, plan.seconds
    figures = {
        **asdict(plan),
        "usd": None if seconds is None or price is None else seconds / 3600 * price,
        "detectable_difference_by_disagreement": {
            f"{share:g}": detectable_difference(plan.items, share) for share in DISAGREEMENTS
        },
    }
    if options.plan and options.json:
        print_json(figures)
    if not options.json:
        _say_plan(task, prompting, plan, figures)
    if options.plan:
        return
    result = _run(path, settings, task, model, prompting)
    if options.json:
        print_json(result)
        return
    columns = ("", "± s.e.", "95% from", "to", "items")
    print_table(("score", *columns), [score_row(name, estimate) for name, estimate in result.scores.items()])
    if result.sections:
        leading = str(result.task["score"])
        say()
        rows = [score_row(section or "–", estimates[leading]) for section, estimates in result.sections.items()]
        print_table((leading, *columns), rows)
    if "nats" in result.scores:
        nats = result.scores["nats"]
        mean, low, high = (_perplexity(value) for value in (nats.mean, nats.low, nats.high))
        say(f"perplexity of the last words {mean}, 95% from {low} to {high}")
    if result.calibration is not None:
        _say_calibration(result.calibration, table=options.calibration)
    if path is not None:
        say(f"written to {path}", wrap=False)


def _perplexity(nats: float) -> str:
    return f"{math.exp(nats):.4g}" if nats < 700 else "infinite"


def _say_calibration(found: "Calibration", *, table: bool) -> None:
    if table:
        say()
        rows = [
            (f"{each.low:.2f} to {each.high:.2f}", f"{each.items:,}", percent(each.confidence), percent(each.accuracy))
            for each in found.bins
        ]
        print_table(("confidence", "items", "mean confidence", "right"), rows)
    how = "overconfident" if found.overconfidence > 0 else "underconfident"
    say(
        f"calibration error {percent(found.error)} ± {percent(found.standard_error)}, where a calibrated model would "
        f"have {percent(found.chance)} by chance; {how} by {percent(abs(found.overconfidence))}"
    )


def _task(options: TaskOptions) -> "tuple[Task, Prompting]":
    from napkin.evaluation.tasks.prompts import Prompting
    from napkin.evaluation.tasks.published import scores_of
    from napkin.evaluation.tasks.running import chosen_items
    from napkin.evaluation.tasks.task_file import read_task

    if options.shots < 0:
        raise NapkinError(f"--shots is {options.shots}: use 0 or more")
    task = read_task(options.task, dev=options.dev, skip_bad=options.skip_bad)
    if task.kind == "pair" and (options.shots or options.chat):
        raise NapkinError("minimal pairs are whole texts without a question: leave out --shots and --chat")
    if task.kind == "instructions" and options.shots:
        raise NapkinError("prompts with instructions have no answer to show: leave out --shots")
    if options.tools and not (options.chat and task.is_generated):
        raise NapkinError("--tools are for answers that a model writes in a conversation: add --chat, or leave it out")
    if options.answer_tokens is not None:
        if not task.is_generated or options.answer_tokens < 1:
            raise NapkinError(
                f"--answer-tokens is {options.answer_tokens}: use 1 or more, for a task whose answers are generated"
            )
        task = replace(task, max_tokens=options.answer_tokens)
    if options.score is not None:
        task = replace(task, score=options.score)
    # Before the model is opened, not after an hour.
    names = list(scores_of(task.kind))
    unconditional = options.unconditional and task.kind == "choice"
    names += ["acc_uncond"] * unconditional
    if task.score and task.score not in names:
        hint = "; acc_uncond needs --unconditional" if task.score == "acc_uncond" else ""
        raise NapkinError(f"the task has no score '{task.score}': use one of {', '.join(names)}{hint}")
    task = chosen_items(task, options.limit, options.seed)
    return task, Prompting(options.shots, options.seed, options.chat, unconditional)


def _with_tools(model: "LoadedModel", names: str) -> "ToolAnswers":
    from napkin.environments.tool_answers import ToolAnswers
    from napkin.environments.tools import tools_named

    return ToolAnswers(model, tools_named(names))


def _run(
    path: Path | None, settings: dict[str, Any], task: "Task", model: "TaskModel", prompting: "Prompting"
) -> "TaskResult":
    from napkin.evaluation.tasks.results import read_result, summarise, write_result
    from napkin.evaluation.tasks.running import run_task

    if path is None:
        notify("the result is printed only: name a file with --out to keep it, and to go on after an interruption")
    with items_beside(path, settings, len(task.items), "items") as log:
        with progress_line("evaluating") as line:
            results = run_task(
                task, model, prompting, log, progress=lambda done, total: line(done, total, f"{done:,}/{total:,} items")
            )
        result = summarise(settings, task, results)
        if path is not None:
            if path.exists():
                # Only a result of the same settings is replaced.
                read_result(path)
            write_result(path, result)
    return result


@contextmanager
def items_beside(path: Path | None, settings: Any, total: int, what: str) -> "Iterator[ItemLog]":
    """Open the log beside a result, whose folder is made if need be, and say how many of the `total` are done already;
    without a path no file is kept."""
    from napkin.evaluation.tasks.results import open_log

    with ExitStack() as stack:
        if path is not None:
            stack.enter_context(folder_for(path))
        log = stack.enter_context(open_log(path and log_of(path), settings))
        if log.done:
            notify(f"{len(log.done):,} of {total:,} {what} are done already")
        yield log


def log_of(path: Path) -> Path:
    """The log of finished items, beside the result."""
    return path.with_name(f"{path.stem}.items.jsonl")


def result_path(folder: str, name: str, settings: Any) -> Path | None:
    """A file in a run's folder, named by what its result is of, so that other settings never meet it; None where the
    folder is not a run."""
    from napkin.runs.run_folder import is_run

    key = hashlib.sha256(json_text.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    return Path(folder) / "evaluations" / f"{name}-{key}.json" if is_run(Path(folder)) else None


def _say_plan(task: "Task", prompting: "Prompting", plan: "TaskPlan", figures: dict[str, Any]) -> None:
    about = "" if plan.counted_items == plan.items else "about "
    examples = f", {prompting.shots} examples before each" if prompting.shots else ""
    generated = f"; up to {plan.generated_tokens:,} tokens are generated" if plan.generated_tokens else ""
    say(
        f"{task.name}: {plan.items:,} items of kind {task.kind}{examples}; {about}{plan.sequences:,} sequences, "
        f"{format_count(plan.tokens)} tokens, of which {format_count(plan.computed_tokens)} are computed: shared "
        f"beginnings once{generated}"
    )
    if task.left_out:
        say(f"{len(task.left_out):,} items are left out, such as {task.left_out[0]}")
    if plan.dropped_examples or plan.cut:
        say(
            f"{about}{plan.dropped_examples:,} items lose examples to fit the model's context, {plan.cut:,} lose the "
            "beginning of their own prompt"
        )
    relatives, strangers = (figures["detectable_difference_by_disagreement"][f"{each:g}"] for each in DISAGREEMENTS)
    say(
        f"These {plan.items:,} items cannot tell two models apart unless they differ by more than {_points(relatives)} "
        f"if they disagree on {DISAGREEMENTS[0]:.0%} of the items, {_points(strangers)} on {DISAGREEMENTS[1]:.0%} "
        "(paired, power 80%, two-sided level 5%)"
    )
    if plan.seconds is not None:
        dollars = "" if figures["usd"] is None else f", ${figures['usd']:.3g}"
        say(f"about {format_seconds(plan.seconds)}{dollars}, by the tokens of {plan.timed_items} items, timed here")


def score_row(name: str, estimate: "Estimate") -> tuple[str, ...]:
    items = f"{estimate.items:,}"
    if estimate.groups != estimate.items:
        items += f" in {estimate.groups:,} groups"
    # Items that all agree have a standard error of 0, which says nothing; the interval does.
    error = shown_score(name, estimate.standard_error) if estimate.standard_error else "–"
    mean, low, high = (shown_score(name, value) for value in (estimate.mean, estimate.low, estimate.high))
    return (name, mean, error, low, high, items)


def shown_score(name: str, value: float) -> str:
    """A score as a percentage, unless it is not a share."""
    from napkin.evaluation.tasks.published import PLAIN_SCORES

    return f"{value:.4f}" if name in PLAIN_SCORES else percent(value)


def _points(difference: float) -> str:
    return f"{100 * difference:.1f} points" if difference <= 1 else "any amount"


def percent(value: float) -> str:
    return f"{100 * value:.2f}%"
