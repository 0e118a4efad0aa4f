"""The stages of a speedrun, in the order of their table: what each reads, runs and leaves, and how it is metered.

Each stage runs commands of napkin, or a function of `texts.py`, which continue where a killed process stopped, or write
their result whole or not at all. speedrun.json says which are finished.
"""

import contextlib
import dataclasses
import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from napkin.accounting.quantities import QuantityRow, Unit
from napkin.cli.common.terminal import say
from napkin.cli.speedrun.first_plan import PATTERN, VOCAB_SIZE, Design, Rows, with_crowding
from napkin.cli.speedrun.texts import ENVIRONMENT, VALIDATION_FRACTION, write_conversations
from napkin.files import atomic_write_text
from napkin.json_files import read_json, write_json
from napkin.recipe.data_config import DataConfig
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import format_recipe, read_recipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.recipe.tuning_recipe import ReinforcementConfig, ReinforcementRecipe, TuningConfig, TuningRecipe

SPEEDRUN_FILE = "speedrun.json"
FORMAT, VERSION = "napkin-speedrun", 1


@dataclass(frozen=True)
class StageFile:
    """A stage in speedrun.json."""

    planned: Rows
    """Rows without a meter: the plan before the first stage."""
    rows: Rows = ()
    """Rows with plan and meter, of a finished stage."""
    commands: tuple[str, ...] = ()
    begun: int = 0
    """Number of times that a process began it."""

    @property
    def is_finished(self) -> bool:
        return bool(self.rows)


@dataclass(frozen=True)
class SpeedrunFile:
    """The content of speedrun.json."""

    options: dict[str, Any]
    """The options that decide what is made."""
    design: Design
    stages: dict[str, StageFile]
    planning_seconds: float
    format: str = FORMAT
    version: int = VERSION
    made_pages: int = 0
    """Pages that were made from Python's own library, because none were named."""
    large: list[dict[str, Any]] = field(default_factory=list)
    """The plan of the same recipe at another size."""


class StageStopped(Exception):
    """A command of a stage that ended with another exit status than 0."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Speedrun:
    """A folder in which the stages work, and its speedrun.json."""

    def __init__(self, folder: Path, file: SpeedrunFile) -> None:
        self.folder, self.file = folder, file
        self.commands: list[str] = []

    def path(self, name: str) -> str:
        """A file or folder of the speedrun, as it is passed to commands."""
        return str(self.folder / name)

    def napkin(self, *typed: str) -> None:
        """Show a command and run it in this process. Raises StageStopped where it fails or is stopped."""
        from napkin.cli import main

        line = f"napkin {shlex.join(typed)}"
        say()
        say(f"$ {line}", style="bold", keep_lines=True)
        self.commands.append(line)
        if status := main(list(typed)):
            raise StageStopped(status)

    def save(self, name: str, **changes: Any) -> None:
        """Write a change of a stage to speedrun.json."""
        stage = dataclasses.replace(self.file.stages[name], **changes)
        self.replace(stages={**self.file.stages, name: stage})

    def replace(self, **changes: Any) -> None:
        """Write a change to speedrun.json."""
        self.file = dataclasses.replace(self.file, **changes)
        write_json(self.folder / SPEEDRUN_FILE, self.file)


def make_corpus(run: Speedrun) -> None:
    run.napkin("data", "run", run.path("pipeline.toml"), "--out", run.path("corpus"))


def corpus_meter(run: Speedrun) -> dict[str, float]:
    from napkin.curation.engine.corpus_files import read_manifest

    manifest = read_manifest(run.folder / "corpus")
    return {
        "documents read": manifest.input.read.documents,
        "documents that remain": manifest.documents,
        "bytes of text that remain": manifest.text_bytes,
    }


def train_tokenizer(run: Speedrun) -> None:
    path = run.path("tokenizer.json")
    # It is written atomically, so an existing one is what this command would write.
    if not Path(path).exists():
        settings = ("--vocab-size", str(VOCAB_SIZE), "--pattern", PATTERN, "--out", path)
        run.napkin("tokenizer", "train", run.path("corpus"), *settings, *_held_out())


def _held_out() -> tuple[str, str]:
    return "--validation-fraction", str(VALIDATION_FRACTION)


def tokenizer_meter(run: Speedrun) -> dict[str, float]:
    from napkin.tokenizer.tokenizer_file import load_tokenizer

    return {"vocabulary": load_tokenizer(run.path("tokenizer.json")).vocab_size}


TOKEN_FILES = ("tokens/train.tokens", "tokens/validation.tokens")


def encode_tokens(run: Speedrun) -> None:
    from napkin.data.token_writer import take_back_unfinished

    paths = [run.folder / name for name in TOKEN_FILES]
    take_back_unfinished(paths)
    if not all(path.exists() for path in paths):
        chosen = ("--tokenizer", run.path("tokenizer.json"), "--out", run.path("tokens"))
        run.napkin("tokenizer", "encode", run.path("corpus"), *chosen, *_held_out())


def tokens_meter(run: Speedrun) -> dict[str, float]:
    from napkin.data.token_file import TokenFile

    files = [TokenFile.open(run.path(name)) for name in TOKEN_FILES]
    disk = sum((run.folder / name).stat().st_size for name in TOKEN_FILES)
    return {"tokens": sum(file.n_tokens for file in files), "bytes on disk": disk}


def train_ladder(run: Speedrun) -> None:
    budget = ("--seconds", f"{run.file.design.ladder_seconds:g}")
    # Two sizes of models cannot tell the exponent of parameters from that of tokens.
    law = "gadre" if run.file.design.short else "chinchilla"
    chosen = ("--run", "--at-once", "1", "--law", law, "--runs", run.path("ladder"))
    run.napkin("ladder", run.path("base.toml"), *budget, *chosen)


def ladder_meter(run: Speedrun) -> dict[str, float]:
    from napkin.runs.run_folder import runs_in

    folders = runs_in(run.folder / "ladder")
    flops = 0.0
    for folder in folders:
        rows = run_rows(folder)
        flops += next((row.meter or row.count or 0 for row in rows if row.quantity == "FLOPs per step"), 0) * _steps(
            folder
        )
    return {"runs": len(folders), "FLOPs": flops}


def _steps(folder: Path) -> int:
    from napkin.runs.accounting_files import PlanFile

    plan = read_json(folder / "plan.json", PlanFile)
    return 0 if plan is None else plan.steps


def run_rows(folder: Path) -> Rows:
    """Rule, count and meter of a run that is over; of one whose measurement was lost, rule and count."""
    from napkin.runs.accounting_files import MEASUREMENT_FILE, MeasurementFile, PlanFile

    measured = read_json(folder / MEASUREMENT_FILE, MeasurementFile)
    plan = read_json(folder / "plan.json", PlanFile)
    return measured.table if measured is not None and measured.table else () if plan is None else plan.table


def pre_train(run: Speedrun) -> None:
    recipe = run.path("ladder/next.toml")
    steps = read_recipe(recipe).training.steps
    often = ("--training.checkpoint-every", str(max(1, steps // 8)), "--training.evaluate-every", str(-(-steps // 4)))
    _train_or_resume(run, "base", "train", recipe, "--law", run.path("ladder/law.json"), *often)


def _train_or_resume(run: Speedrun, name: str, *typed: str) -> None:
    from napkin.runs.run_folder import is_run

    folder = run.path(name)
    if is_run(Path(folder)):
        run.napkin("resume", folder)
    else:
        run.napkin(*typed, "--run", folder)


def pre_training_meter(run: Speedrun) -> Iterator[QuantityRow]:
    yield from run_rows(run.folder / "base")


def last_loss(folder: Path) -> float | None:
    """The validation loss of a run's last evaluation."""
    from napkin.report.overfitting import evaluations
    from napkin.runs.run_record import read_run_record

    evaluated = evaluations(read_run_record(folder).metrics)
    return evaluated[-1].loss if evaluated else None


def make_conversations(run: Speedrun) -> None:
    folder = run.folder / "conversations"
    if not folder.exists():
        write_conversations(run.folder / "corpus", folder, run.file.options["seed"])


def conversations_meter(run: Speedrun) -> Iterator[QuantityRow]:
    for name, what in (("train", "to learn from"), ("validation", "held out"), ("task", "questions with choices")):
        yield QuantityRow(what, "count", meter=_lines(run, name))


def _lines(run: Speedrun, name: str) -> int:
    return (run.folder / "conversations" / f"{name}.jsonl").read_text(encoding="utf-8").count("\n")


def _training(steps: int, **chosen: Any) -> TrainingConfig:
    every = max(1, -(-steps // 4))
    return TrainingConfig(steps=steps, keep_checkpoints=1, checkpoint_every=every, evaluate_every=every, **chosen)


def tuning_recipe(run: Speedrun, steps: int) -> Recipe:
    """Supervised tuning of the pre-trained model on the conversations."""
    folder, seed = run.path("conversations"), run.file.options["seed"]
    return TuningRecipe(
        data=DataConfig(train=f"{folder}/train.jsonl", validation=f"{folder}/validation.jsonl", tokenizer=""),
        optimizer=OptimizerConfig(learning_rate=3e-3, schedule="cosine"),
        training=_training(steps, batch_size=32, data_seed=seed),
        tuning=TuningConfig(start=run.path("base")),
    )


def reward_recipe(run: Speedrun, steps: int) -> Recipe:
    """Reinforcement learning of sums by the tuned model."""
    return ReinforcementRecipe(
        optimizer=OptimizerConfig(learning_rate=1e-3, schedule="linear", weight_decay=0.0),
        training=_training(steps, batch_size=32),
        tuning=TuningConfig(method="rl", start=run.path("tuned")),
        rl=ReinforcementConfig(
            environment=ENVIRONMENT,
            group_size=8,
            max_answer=8,
            seed=run.file.options["seed"],
            answers_at_a_time=256,
        ),
    )


FEWEST_STEPS = 8
MOST_EPOCHS = 3
"""Times that tuning reads a conversation. A model of 418,272 parameters had its lowest held-out loss within the first
four, and in eighteen learned the wrong sums of its teacher by heart."""
MOST_ASKED = 10
"""Times that rewards ask a sum. That model was right on two of three held-out sums then, on none after thirty."""
_SUMS_OF_ONE_DIGIT = 100


def recipe_within(
    run: Speedrun, name: str, seconds: float, most: int, recipe_of: Callable[[Speedrun, int], Recipe]
) -> str:
    """The file of a recipe with as many steps as the seconds allow by its own plan, and `most`; one that exists stays.

    Like the first plan, it takes as many times the planner's seconds as other programs' computing makes of them, as
    found while this plan is made: they may have come or gone since the first.
    """
    path = run.folder / f"{name}.toml"
    if not path.exists():
        from napkin.cli.common.progress import progress_line
        from napkin.training.method import Setting
        from napkin.training.run import prepare

        with progress_line(f"planning {name}") as line:
            plan, crowding = with_crowding(
                lambda: prepare(recipe_of(run, FEWEST_STEPS), run.folder / name, Setting(progress=line.retitle)).plan
            )
        assert plan is not None
        steps = min(most, max(FEWEST_STEPS, int(seconds / crowding / max(plan.seconds_per_step, 1e-9))))
        atomic_write_text(path, format_recipe(recipe_of(run, steps)))
    return str(path)


def tune(run: Speedrun) -> None:
    batch_size = tuning_recipe(run, FEWEST_STEPS).training.batch_size
    most = -(-MOST_EPOCHS * _lines(run, "train") // batch_size)
    recipe = recipe_within(run, "tuned", run.file.design.tuning_seconds, most, tuning_recipe)
    _train_or_resume(run, "tuned", "tune", "sft", recipe)


def learn_from_rewards(run: Speedrun) -> None:
    asked = reward_recipe(run, FEWEST_STEPS)
    assert isinstance(asked, ReinforcementRecipe)
    most = MOST_ASKED * _SUMS_OF_ONE_DIGIT * asked.rl.group_size // asked.training.batch_size
    recipe = recipe_within(run, "rewarded", run.file.design.reward_seconds, most, reward_recipe)
    _train_or_resume(run, "rewarded", "tune", "rl", recipe)


def tuning_meter(run: Speedrun) -> Iterator[QuantityRow]:
    yield from run_rows(run.folder / "tuned")
    yield QuantityRow("held-out loss", "nats", meter=last_loss(run.folder / "tuned"), note="per learned token")


def rewards_meter(run: Speedrun) -> Iterator[QuantityRow]:
    from napkin.report.headline import CORRECT
    from napkin.runs.run_record import read_run_record

    yield from run_rows(run.folder / "rewarded")
    metrics = read_run_record(run.folder / "rewarded").metrics
    rewards = [figures[CORRECT] for each in metrics if (figures := each.figures) and figures.get(CORRECT) is not None]
    for name, values in (("held-out sums right, first", rewards[:1]), ("held-out sums right, last", rewards[-1:])):
        for value in values:
            yield QuantityRow(name, "share", meter=value)


TASK_RESULTS = {"tuned": "scores/tuned.json", "rewarded": "scores/rewarded.json"}


def score(run: Speedrun) -> None:
    run.napkin("evaluate", run.path("base"))
    task = run.folder / "conversations" / "task.jsonl"
    if not task.stat().st_size:
        say("too few documents are held out for questions with choices: none are asked")
        return
    for name, result in TASK_RESULTS.items():
        if not (run.folder / result).exists():
            (run.folder / result).parent.mkdir(exist_ok=True)
            run.napkin("evaluate", "task", run.path(name), "--task", str(task), "--chat", "--out", run.path(result))


def scores_meter(run: Speedrun) -> Iterator[QuantityRow]:
    from napkin.runs.accounting_files import Evaluation

    evaluation = read_json(run.folder / "base" / "evaluation.json", Evaluation)
    if evaluation is not None:
        bits = {
            "model": evaluation.bits_per_byte,
            "gzip -9": evaluation.gzip_bits_per_byte,
            "xz -9": evaluation.xz_bits_per_byte,
        }
        for name, value in bits.items():
            yield QuantityRow(f"bits per byte, {name}", "bits", meter=value)
    for name, result in TASK_RESULTS.items():
        with contextlib.suppress(OSError, ValueError, KeyError):
            scores = json.loads((run.folder / result).read_text(encoding="utf-8"))["scores"]["acc_norm"]
            yield QuantityRow(
                f"right of four choices, {name}",
                "share",
                count=0.25,
                meter=scores["mean"],
                note=f"plan: chance; 95% from {scores['low']:.0%} to {scores['high']:.0%}",
            )


def chat(run: Speedrun) -> None:
    """Ask the last model, and write what it says."""
    from napkin.environments.registry import environment_named
    from napkin.inference.conversation import Conversation
    from napkin.inference.loaded_model import load
    from napkin.inference.settings import Sampling

    lines = (run.folder / "conversations" / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    environment = environment_named(ENVIRONMENT, held_out=True)
    # There are few different sums: several seeds give the same one, or the same with its numbers swapped.
    asked = [environment.start(seed).messages[-1].content for seed in range(100)]
    sums = {"".join(sorted(question)): question for question in reversed(asked)}
    questions = [*sums.values()][:3] + [json.loads(line)["messages"][0]["content"] for line in lines[:3]]
    conversation = Conversation(load(run.path("rewarded")))
    said: list[str] = []
    for question in questions:
        conversation.forget()
        answer = "".join(conversation.answer(question, Sampling(temperature=0.0), max_new_tokens=60))
        said.append(f"user: {question}\nassistant: {answer.strip()}\n")
        say(said[-1], keep_lines=True)
    atomic_write_text(run.folder / "chat.txt", "\n".join(said), overwrite=True)


def chat_meter(run: Speedrun) -> dict[str, float]:
    return {"answers": (run.folder / "chat.txt").read_text(encoding="utf-8").count("assistant:")}


Meter = Callable[[Speedrun], "dict[str, float] | Iterator[QuantityRow]"]


@dataclass(frozen=True)
class Stage:
    """A row of the table."""

    title: str
    reads: str
    leaves: str
    work: Callable[[Speedrun], None]
    meter: Meter


STAGES = {
    "corpus": Stage("A corpus of raw pages", "the pages, pipeline.toml", "corpus/", make_corpus, corpus_meter),
    "tokenizer": Stage("A tokenizer", "corpus/", "tokenizer.json", train_tokenizer, tokenizer_meter),
    "tokens": Stage("Tokens", "corpus/, tokenizer.json", "tokens/", encode_tokens, tokens_meter),
    "ladder": Stage(
        "A ladder, and the loss it predicts", "tokens/, base.toml", "ladder/, law.json", train_ladder, ladder_meter
    ),
    "pre-training": Stage("Pre-training", "tokens/, ladder/next.toml", "base/", pre_train, pre_training_meter),
    "conversations": Stage("Conversations", "corpus/", "conversations/", make_conversations, conversations_meter),
    "tuning": Stage("Supervised tuning", "base/, conversations/", "tuned/", tune, tuning_meter),
    "rewards": Stage("Rewards", f"tuned/, {ENVIRONMENT}", "rewarded/", learn_from_rewards, rewards_meter),
    "scores": Stage("Scores", "base/, tuned/, rewarded/", "scores/", score, scores_meter),
    "chat": Stage("Chat", "rewarded/", "chat.txt", chat, chat_meter),
}

_UNITS: dict[str, Unit] = {"answers": "count"}


def metered(run: Speedrun, name: str, seconds: float) -> Rows:
    """The rows of a stage that is over: its plan with its meter, and what is metered alone."""
    found = STAGES[name].meter(run)
    planned = {row.quantity: row for row in run.file.stages[name].planned}
    meters: dict[str, Any] = dict(found) if isinstance(found, dict) else {}
    rows = {
        quantity: dataclasses.replace(row, meter=seconds if quantity == "seconds" else meters.pop(quantity, None))
        for quantity, row in planned.items()
    }
    rows |= {quantity: QuantityRow(quantity, _UNITS[quantity], meter=value) for quantity, value in meters.items()}
    if not isinstance(found, dict):
        for row in found:
            first = rows.get(row.quantity)
            # The run's own plan is closer, and is shown as its plan; the first plan is shown beside it, as the rule.
            rows[row.quantity] = (
                row if first is None or row.rule is not None else dataclasses.replace(row, rule=first.count)
            )
    if run.file.stages[name].begun > 1:
        note = f"begun {run.file.stages[name].begun} times: the seconds are of the last"
        rows["seconds"] = dataclasses.replace(rows["seconds"], note=note)
    return tuple(rows.values())
