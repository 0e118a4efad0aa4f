"""The result of a task: scores with their errors, by section and in all, and everything that reproduces it; and the log
of items that are done."""

import json
import os
import platform
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy
import torch

import napkin
from napkin.errors import NapkinError, first_line
from napkin.evaluation.calibration import Calibration, calibration_of, choice_probabilities
from napkin.evaluation.tasks.prompts import Prompting
from napkin.evaluation.tasks.published import Item, Task, scores_of
from napkin.evaluation.uncertainty import Estimate, PairedDifference, mean_estimate, paired_difference
from napkin.files import regular, try_lock
from napkin.grading.instructions import instructions_followed
from napkin.json_files import read_json, write_json

FORMAT, LOG_FORMAT = "napkin-task-result", "napkin-task-items"
VERSION = 1


@dataclass(frozen=True)
class ItemResult:
    """A model's answer to an item."""

    name: str
    section: str
    group: str
    scores: dict[str, float]
    """Scores, 0 or 1, by name."""
    logprobs: tuple[float, ...] = ()
    """The log-probability of each choice, in nats."""
    tokens: tuple[int, ...] = ()
    """The number of tokens of each choice."""
    unconditional: tuple[float, ...] | None = None
    """Log-probability of each choice without the question."""
    text: str | None = None
    found: str | None = None
    """The part of the generated text that was taken as the answer."""
    dropped_examples: int = 0
    cut_tokens: int = 0
    texts: tuple[str, ...] = ()
    """Sampled programs of a problem."""
    passed: tuple[bool, ...] = ()
    """True for each program that passes its tests."""


@dataclass(frozen=True)
class TaskResult:
    """The file of a task's result."""

    format: str
    version: int
    task: dict[str, Any]
    """Name, kind, leading score, files with their SHA-256, how items were put."""
    model: dict[str, Any]
    made_with: dict[str, str]
    """Versions of what computed it."""
    scores: dict[str, Estimate]
    sections: dict[str, dict[str, Estimate]]
    """Scores of each section, where there are several."""
    names: list[str]
    """Names of the items, in order."""
    groups: list[str]
    item_scores: dict[str, list[float]]
    """Scores of each item, by name of the score."""
    dropped_examples: int = 0
    """Items that lost examples to fit the context."""
    cut: int = 0
    """Items whose own tokens were truncated."""
    left_out: list[str] = field(default_factory=list)
    """Items that could not be scored, and why."""
    calibration: Calibration | None = None
    """The calibration of the probabilities of choices."""

    def refuse_other_items(self, items: Iterable[Item]) -> None:
        """Raise NapkinError where the result has items that are not among these of a task."""
        missing = {*self.names} - {item.name for item in items}
        if missing:
            raise NapkinError(
                f"the result has items that the task does not have, such as {min(missing)!r}: name the task's own files"
            )

    def scores_without(self, contaminated: Collection[str]) -> dict[str, dict[str, Estimate | None]]:
        """Each score over "all" items, the "clean" ones and the "contaminated" ones; None where there are none."""
        # An item without a group is a group of its own.
        groups = [group or f"\0{name}" for group, name in zip(self.groups, self.names, strict=True)]
        chosen = {
            "all": range(len(self.names)),
            "clean": [at for at, name in enumerate(self.names) if name not in contaminated],
            "contaminated": [at for at, name in enumerate(self.names) if name in contaminated],
        }
        return {
            score: {
                which: mean_estimate([values[at] for at in kept], [groups[at] for at in kept]) if kept else None
                for which, kept in chosen.items()
            }
            for score, values in self.item_scores.items()
        }


def versions() -> dict[str, str]:
    return {
        "napkin": napkin.__version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def settings_of(task: Task, model: Mapping[str, Any], prompting: Prompting) -> dict[str, Any]:
    """Everything that the items' results depend on."""
    return {
        "task": {
            "name": task.name,
            "kind": task.kind,
            "score": leading_score(task),
            "files": task.files,
            "dev_files": task.dev_files if prompting.shots else {},
            "items": len(task.items),
            # The names of a sample's items identify it.
            "sample": [item.name for item in task.items] if len(task.items) < 2000 else None,
            "description": task.description,
            "delimiter": task.delimiter,
            "separator": task.separator,
            "stop": list(task.stop),
            "max_tokens": task.max_tokens if task.is_generated else None,
            "answer_context": task.answer_context,
            **asdict(prompting),
        },
        "model": dict(model),
        "made_with": versions(),
    }


def leading_score(task: Task) -> str:
    return task.score or scores_of(task.kind)[0]


def summarise(settings: Mapping[str, Any], task: Task, results: Sequence[ItemResult]) -> TaskResult:
    """The result of a task's items. Raises NapkinError where the leading score is not one of theirs."""
    names = list(results[0].scores)
    if leading_score(task) not in names:
        raise NapkinError(f"the task has no score '{leading_score(task)}': use one of {', '.join(names)}")

    def estimates(chosen: Sequence[ItemResult]) -> dict[str, Estimate]:
        groups = [each.group or f"\0{each.name}" for each in chosen]
        return {name: mean_estimate([each.scores[name] for each in chosen], groups) for name in names}

    sections = list(dict.fromkeys(each.section for each in results))
    return TaskResult(
        FORMAT,
        VERSION,
        scores=estimates(results) | _of_instructions(task, results),
        calibration=_calibration(results) if task.kind == "choice" else None,
        sections={
            section: estimates([each for each in results if each.section == section])
            for section in (sections if len(sections) > 1 else [])
        },
        names=[each.name for each in results],
        groups=[each.group for each in results],
        item_scores={name: [each.scores[name] for each in results] for name in names},
        dropped_examples=sum(each.dropped_examples > 0 for each in results),
        cut=sum(each.cut_tokens > 0 for each in results),
        left_out=list(task.left_out),
        **settings,
    )


def _calibration(results: Sequence[ItemResult]) -> Calibration:
    confidences = [float(choice_probabilities(each.logprobs).max()) for each in results]
    right = [each.scores["acc"] == 1 for each in results]
    return calibration_of(confidences, right, [each.group or f"\0{each.name}" for each in results])


def _of_instructions(task: Task, results: Sequence[ItemResult]) -> dict[str, Estimate]:
    """The shares of single instructions that are followed, those of a prompt clustered."""
    if task.kind != "instructions":
        return {}
    answers = {item.name: item.answer for item in task.items}
    followed = [instructions_followed(each.text or "", answers[each.name]) for each in results]
    found = {}
    for name, at in (("instruction_strict", 0), ("instruction_loose", 1)):
        pairs = [
            (float(kept), each.group or f"\0{each.name}")
            for each, both in zip(results, followed, strict=True)
            for kept in both[at]
        ]
        found[name] = mean_estimate([kept for kept, _ in pairs], [group for _, group in pairs])
    return found


def write_result(path: Path, result: TaskResult) -> None:
    write_json(path, result)


def read_result(path: Path) -> TaskResult:
    """Read a result. Raises NapkinError where there is none, CorruptFile where it was damaged."""
    found = read_json(path, TaskResult)
    if found is None:
        raise NapkinError(f"there is no result '{path}': write one with `napkin evaluate RUN --task FILE`")
    if found.format != FORMAT or found.version > VERSION:
        raise NapkinError(f"'{path}' is not a result of this version of napkin: name one that it wrote")
    n_items = len(found.names)
    if {len(found.groups), *map(len, found.item_scores.values())} != {n_items} or not n_items:
        raise NapkinError(f"'{path}' does not have a score for each item: restore the file")
    return found


def compare_results(first: TaskResult, second: TaskResult, score: str | None = None) -> PairedDifference:
    """The differences of two models on the items that both have done; None is the leading score of the first.

    Raises NapkinError for results of different files or without a common item.
    """
    return paired_difference(*common_scores(first, second, score))


def common_scores(
    first: TaskResult, second: TaskResult, score: str | None = None
) -> tuple[list[float], list[float], list[str]]:
    """The scores of both on the items that both have done, and each item's group; raises as `compare_results`."""
    score = score or str(first.task.get("score"))
    for result in (first, second):
        if score not in result.item_scores:
            listed = ", ".join(result.item_scores)
            raise NapkinError(f"'{result.task.get('name')}' has no score '{score}': use one of {listed}")
    if _digests(first) != _digests(second):
        raise NapkinError(
            f"the results are of different files ({_files(first)}; {_files(second)}): compare results of the same task"
        )
    theirs = dict(zip(second.names, second.item_scores[score], strict=True))
    common = [place for place, name in enumerate(first.names) if name in theirs]
    if not common:
        raise NapkinError("the results have no item in common: use the same --limit and --seed")
    return (
        [first.item_scores[score][place] for place in common],
        [theirs[first.names[place]] for place in common],
        [first.groups[place] or f"\0{first.names[place]}" for place in common],
    )


def read_results(folder: Path) -> dict[Path, TaskResult]:
    """The results of tasks in a folder, or in the evaluations of a run's folder, by their paths."""
    inside = folder / "evaluations"
    paths = sorted((inside if inside.is_dir() else folder).glob("*.json"))
    kinds = {path: read_json(path, dict) or {} for path in paths}
    found = {path: read_result(path) for path, values in kinds.items() if values.get("format") == FORMAT}
    if not found:
        raise NapkinError(f"'{folder}' has no result of a task: write some with `napkin evaluate RUN --task FILE`")
    return found


def matching_results(first: Path, second: Path) -> list[tuple[Path, Path]]:
    """Pairs of results from two folders, of the same tasks with the same settings. Raises NapkinError where there are
    none, and where a folder has several of one task, so that it is ambiguous which is meant.
    """
    sides = []
    for folder in (first, second):
        by_task: dict[str, Path] = {}
        for path, result in read_results(folder).items():
            identity = {**result.task, "files": _digests(result), "items": None, "sample": None}
            key = json.dumps(identity, sort_keys=True, default=str)
            if key in by_task:
                raise NapkinError(
                    f"'{by_task[key]}' and '{path}' are of the same task: name the files that are to be compared"
                )
            by_task[key] = path
        sides.append(by_task)
    found = [(path, sides[1][key]) for key, path in sides[0].items() if key in sides[1]]
    if not found:
        raise NapkinError(f"'{first}' and '{second}' have no task in common, put in the same way: name two results")
    return found


def _digests(result: TaskResult) -> list[str]:
    """SHA-256 of the contents, wherever the files are."""
    files: Any = result.task.get("files")
    return sorted(map(str, dict(files or {}).values()))


def _files(result: TaskResult) -> str:
    files: Any = result.task.get("files")
    return ", ".join(f"{name} {str(digest)[:8]}" for name, digest in dict(files or {}).items())


# The items that are done, a line of JSON each: after a kill an evaluation goes on where it was. The first line has the
# settings. Lines are appended and synced batch by batch; an incomplete last line, which a kill may leave, is dropped.


class ItemLog:
    """The lines of one evaluation; made by `open_log`."""

    def __init__(self, file: Any, done: dict[str, ItemResult]) -> None:
        self._file, self.done = file, done

    def add(self, results: Sequence[ItemResult]) -> None:
        """Append lines, and sync them to disk."""
        self.done |= {each.name: each for each in results}
        if self._file is not None:
            self._file.write("".join(json.dumps(asdict(each)) + "\n" for each in results).encode())
            self._file.flush()
            os.fsync(self._file.fileno())


@contextmanager
def open_log(path: Path | None, settings: Mapping[str, Any]) -> Iterator[ItemLog]:
    """The log at `path`, new or continued; None keeps no file.

    Raises NapkinError where the file is that of another evaluation, is damaged, or another process writes it.
    """
    if path is None:
        yield ItemLog(None, {})
        return
    descriptor = regular(path, os.O_RDWR | os.O_CREAT)
    with open(descriptor, "r+b") as file:
        if not try_lock(file.fileno()):
            raise NapkinError(f"'{path}' is being written by another evaluation: wait for it, or choose another --out")
        content = file.read()
        end = content.rfind(b"\n") + 1
        lines = content[:end].splitlines()
        header = json.dumps({"format": LOG_FORMAT, "version": VERSION, "settings": settings}, sort_keys=True).encode()
        if content and not content.startswith(b'{"format": "' + LOG_FORMAT.encode()) and not header.startswith(content):
            raise NapkinError(f"'{path}' is not a log of items: it is not overwritten, choose another --out")
        if lines and lines[0] != header:
            raise NapkinError(f"'{path}' is of an evaluation with other settings: remove it, or choose another --out")
        done = {result.name: result for result in _results(path, lines[1:])}
        file.seek(end)
        file.truncate()
        if not lines:
            file.write(header + b"\n")
        log = ItemLog(file, done)
        try:
            yield log
        except BaseException:
            if not log.done:
                # An evaluation that is refused leaves no file.
                path.unlink(missing_ok=True)
            raise


def _results(path: Path, lines: Sequence[bytes]) -> Iterator[ItemResult]:
    for number, line in enumerate(lines, 2):
        try:
            yield msgspec.json.decode(line, type=ItemResult)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise NapkinError(f"'{path}' line {number} is damaged ({first_line(error)}): remove that line") from None
