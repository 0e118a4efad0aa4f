"""`napkin evaluate programs [RUN] --problems FILE`: sampled programs against tests, and pass@k."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from napkin.cli.common.files import refuse_existing
from napkin.cli.common.options import JsonOption, Switch, command, refuse_given
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.cli.evaluate.tasks import items_beside, log_of, result_path, score_row
from napkin.errors import NapkinError

if TYPE_CHECKING:
    from collections.abc import Callable

    from napkin.evaluation.tasks.programs import Problem

MOST_SAMPLES = 10_000


@dataclass(frozen=True)
class ProgramOptions(JsonOption):
    """Let a model write programs, several of each problem, run them against tests in the sandbox, and estimate pass@k
    without bias; or grade the programs of --completions. Problems that are done are kept beside the result."""

    run: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = None
    """Folder of a run, or a Hugging Face folder; none with --completions."""
    problems: str = ""
    """Problems in HumanEval's form, JSONL: task_id, prompt, test, entry_point; required."""
    completions: str | None = None
    """Samples that were made elsewhere, JSONL: task_id, completion; as many of each problem."""
    k: tuple[int, ...] = (1,)
    """The numbers of samples of which one is to pass; the first one leads."""
    samples: int = 10
    """Samples of each problem, at least the largest k; more of them make the estimate surer."""
    temperature: float = 0.8
    """Logits are divided by it; 0 always takes the likeliest token, so that all samples are equal."""
    top_p: float = 0.95
    """Draw among the likeliest tokens that together reach this probability."""
    seed: int = 0
    """Seed of the draws."""
    answer_tokens: int = 256
    """Tokens of a program, at most."""
    chat: Switch = False
    """Put the problem as a message in the model's chat template; the answer's fenced block is the program."""
    limit: int | None = None
    """Use only this many problems, from the first on; None is all."""
    seconds: float = 10.0
    """Processor seconds, and seconds by the clock, of a program under its tests."""
    weights: Literal["auto", "fp32", "bf16"] = "fp32"
    """Number format of the weights; auto is bf16 where the device multiplies it natively."""
    out: str | None = None
    """JSON file of the result; None is in the run's folder."""


@command("evaluate programs", ProgramOptions)
def evaluate_programs(options: ProgramOptions) -> None:
    _refuse_options(options)
    from napkin.evaluation.tasks.programs import grade_problems, read_completions, read_problems, summarise_problems
    from napkin.evaluation.tasks.results import versions, write_result
    from napkin.evaluation.tasks.task_file import digests
    from napkin.grading.reward import code_reward

    problems, asked = read_problems(options.problems), Path(options.problems)
    completions = None if options.completions is None else read_completions(options.completions, problems)
    problems = problems[: options.limit]
    n_samples = options.samples if completions is None else len(completions[problems[0].name])
    bad = [k for k in options.k if not 1 <= k <= n_samples]
    if bad or not options.k:
        raise NapkinError(f"--k is {bad[0] if bad else 'empty'}: use 1 to {n_samples}, the samples of each problem")
    reward = code_reward(options.seconds)
    if completions is None:
        model, how, sample = _sampler(options)
    else:
        refuse_given(
            options, ("temperature", "top_p", "seed", "answer_tokens", "chat", "samples"), "is of programs to be drawn"
        )
        model, how = {"name": options.completions}, {"completions": digests([Path(str(options.completions))])}
        sample = functools.partial(_of_file, completions)
    settings = {
        "task": {
            "name": asked.stem,
            "kind": "programs",
            "score": f"pass@{options.k[0]}",
            "files": digests([asked]),
            "items": len(problems),
            "k": list(options.k),
            "samples": n_samples,
            "seconds": options.seconds,
            **how,
        },
        "model": model,
        "made_with": versions(),
    }
    path = None if options.out is None else Path(options.out)
    if path is None and options.run is not None:
        path = result_path(options.run, "programs", settings)
    if path is not None and path.exists() and not log_of(path).exists():
        refuse_existing(path)
    progress = progress_line("writing and running programs")
    with items_beside(path, settings, len(problems), "problems") as log, progress as line:
        results = grade_problems(
            problems,
            sample,
            options.k,
            reward,
            log,
            progress=lambda done, total: line(done, total, f"{done:,}/{total:,} problems"),
        )
        result = summarise_problems(settings, results)
        if path is not None:
            write_result(path, result)
    for reason, count in reward.failures.most_common(5):
        notify(f"{count:,} programs count as failed since they could not be judged: {reason}")
    if options.json:
        print_json(result)
        return
    n_passed = sum(sum(each.passed) for each in results)
    say(f"{asked.stem}: {n_passed:,} of {n_samples * len(problems):,} programs pass, {n_samples:,} of each problem")
    columns = ("", "± s.e.", "95% from", "to", "problems")
    print_table(("score", *columns), [score_row(name, estimate) for name, estimate in result.scores.items()])
    if path is not None:
        say(f"written to {path}", wrap=False)


def _refuse_options(options: ProgramOptions) -> None:
    if not options.problems:
        raise NapkinError("--problems names no file: give a file of problems, in HumanEval's form")
    if (options.run is None) == (options.completions is None):
        raise NapkinError("name one of a RUN, whose model writes programs, and --completions, a file of programs")
    for name, value, most in (
        ("samples", options.samples, MOST_SAMPLES),
        ("answer-tokens", options.answer_tokens, 2**20),
    ):
        if not 1 <= value <= most:
            raise NapkinError(f"--{name} is {value}: use 1 to {most:,}")
    if not 0 < options.seconds <= 3600:
        raise NapkinError(f"--seconds is {options.seconds}: use a number above 0, up to 3600")
    if options.limit is not None and options.limit < 1:
        raise NapkinError(f"--limit is {options.limit}: use 1 or more problems")


def _of_file(completions: dict[str, list[str]], problem: "Problem") -> list[str]:
    return completions[problem.name]


def _sampler(options: ProgramOptions) -> "tuple[dict[str, Any], dict[str, Any], Callable[[Problem], list[str]]]":
    """The model's identity for results, the settings of its prompts, and the function that samples programs for a
    problem."""
    from napkin.evaluation.tasks.programs import STOP, sample_seed
    from napkin.inference.loaded_model import load
    from napkin.inference.settings import Sampling

    sampling = Sampling(temperature=options.temperature, top_p=options.top_p, seed=options.seed)
    with progress_line("opening the model"):
        model = load(str(options.run), weights=options.weights, on_message=notify)
    stop = () if options.chat else STOP
    room = model.context_length - options.answer_tokens
    if room < 1:
        raise NapkinError(
            f"a program of up to {options.answer_tokens} tokens leaves no room for a prompt in a context of "
            f"{model.context_length}: use a smaller --answer-tokens"
        )

    def sample(problem: "Problem") -> list[str]:
        if options.chat:
            ids = model.encode_chat([("user", problem.prompt)])
        else:
            ids = [*model.start_ids, *model.encode(problem.prompt.rstrip())]
        # A prompt that does not fit loses its beginning, as the prompts of tasks do.
        prompts = [tuple(ids[-room:])] * options.samples
        seeded = Sampling(
            temperature=options.temperature, top_p=options.top_p, seed=sample_seed(options.seed, problem.name)
        )
        texts = dict(model.complete(prompts, options.answer_tokens, stop, seeded))
        lost = "" if options.chat else problem.prompt[len(problem.prompt.rstrip()) :]
        return [texts[number].removeprefix(lost) for number in range(options.samples)]

    how = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "max_tokens": options.answer_tokens,
        "stop": list(stop),
        "chat": options.chat,
    }
    return model.about(), how, sample
