"""Tasks as files: JSONL, CSV or TOML, of napkin's own form or as benchmarks publish them.

A row of napkin's own form is one of

    {"prompt": ..., "choices": [...], "answer": ...}    the answer is a choice, its letter or its number from 0
    {"good": ..., "bad": ...}                           two texts, of which the first ought to be likelier
    {"prompt": ..., "answer": ...}                      the model writes the answer

with "id", "section" and "group" if there are any; in a CSV file, whose first row has the headings, choices are the
columns that begin with "choice". A TOML file names the file of rows, or has them as [[item]], and says what they are
and how they are put to a model: see `TaskFile`.
"""

import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from napkin.errors import NapkinError, first_line
from napkin.evaluation.tasks.published import (
    GENERATED,
    KINDS,
    LETTERS,
    MMLU_DESCRIPTION,
    Item,
    Kind,
    Task,
    format_of,
    lettered,
    read_mmlu,
    text_of,
    texts_of,
)
from napkin.files import StrPath, read_bounded
from napkin.grading.instructions import read_instructions
from napkin.grading.mathematics.math_answer import check_math_reference, check_number_reference
from napkin.toml_files import parse_toml

_MOST_BYTES = 2**30
_SPLIT = re.compile(r"[_-](test|dev|val|validation|train)$")
_COLUMN = re.compile(r"\{(\w+)\}")
_CHECKS: dict[str, Callable[[str], Any]] = {
    "number": check_number_reference,
    "math": check_math_reference,
    "instructions": read_instructions,
}


class TaskFile(msgspec.Struct, forbid_unknown_fields=True):
    """A TOML file that describes a task; what it leaves out is as the format of the rows has it."""

    name: str | None = None
    kind: str | None = None
    """One of `KINDS`; None derives it from the rows."""
    items: str | None = None
    """File of rows, relative to this file."""
    item: list[dict[str, Any]] = []
    """Rows."""
    dev: str | None = None
    """File of rows from which few-shot examples are taken."""
    prompt: str | None = None
    """The prompt, with {column} for what a row has there."""
    choices: str | list[str] | None = None
    """The column of a list of choices, or the columns of one choice each."""
    answer: str = "answer"
    """The column of the answer."""
    letters: bool = False
    """Whether the choices are listed in the prompt, with their letters as the continuations."""
    description: str | None = None
    delimiter: str | None = None
    separator: str | None = None
    stop: list[str] | None = None
    max_tokens: int | None = None
    score: str | None = None
    answer_context: str | None = None


def read_task(
    paths: Sequence[StrPath], *, dev: Sequence[StrPath] = (), name: str | None = None, skip_bad: bool = False
) -> Task:
    """Read a task; several files, or folders of files, are sections of one.

    `dev` are files of items that examples are taken from. With `skip_bad` items that cannot be scored are left out and
    listed in `left_out`. Raises NapkinError for a file that is not a task and names file, line and what is wrong.
    """
    files, dev_files = _files(paths), _files(dev)
    if len(files) == 1 and files[0].suffix.lower() == ".toml":
        task = _described(files[0], dev_files, skip_bad=skip_bad)
    else:
        task = _of_rows(files, dev_files, None, skip_bad=skip_bad)
    if name is not None:
        task = replace(task, name=name)
    elif not task.name:
        task = replace(task, name=_stem(files[0]) if len(files) == 1 else Path(paths[0]).resolve().name)
    if not task.items:
        raise NapkinError(f"'{paths[0]}' has no item: give at least one")
    seen: set[str] = set()
    for item in task.items:
        if item.name in seen:
            raise NapkinError(f"'{paths[0]}' has two items called {item.name!r}: give each an id of its own")
        seen.add(item.name)
    return task


def _files(paths: Sequence[StrPath]) -> list[Path]:
    """The tables of a folder, in the order of their names; any other path is a table itself."""
    found: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(each for each in path.iterdir() if each.suffix in (".jsonl", ".csv")) if path.is_dir() else None
        if inside == []:
            raise NapkinError(f"'{path}' has no .jsonl or .csv file: name task files")
        found += [path] if inside is None else inside
    return found


def _described(path: Path, dev: list[Path], *, skip_bad: bool) -> Task:
    try:
        about = msgspec.convert(
            parse_toml(read_bounded(path, _MOST_BYTES, what="a task file").decode("utf-8-sig")), TaskFile
        )
    except (ValueError, RecursionError) as error:
        raise NapkinError(f"'{path}' is not a task ({first_line(error)}): correct it") from None
    if about.kind is not None and about.kind not in KINDS:
        raise NapkinError(f"'{path}' has kind {about.kind!r}: use one of {', '.join(KINDS)}")
    if (about.items is None) == (not about.item):
        raise NapkinError(f"'{path}' needs rows: name their file as items, or write each as [[item]]")
    if about.max_tokens is not None and about.max_tokens < 1:
        raise NapkinError(f"'{path}' has max_tokens {about.max_tokens}: use 1 or more")
    files = [] if about.items is None else [path.parent / about.items]
    if about.dev is not None and not dev:
        dev = [path.parent / about.dev]
    task = _of_rows(files, dev, about, skip_bad=skip_bad, described=path)
    overrides = {field: getattr(about, field) for field in ("description", "delimiter", "separator", "score")}
    overrides |= {"answer_context": about.answer_context, "max_tokens": about.max_tokens, "name": about.name}
    overrides["stop"] = None if about.stop is None else tuple(about.stop)
    return replace(task, **{field: value for field, value in overrides.items() if value is not None})


def _of_rows(
    files: list[Path], dev: list[Path], about: TaskFile | None, *, skip_bad: bool, described: Path | None = None
) -> Task:
    reader = _Reader(about, skip_bad=skip_bad)
    several = len(files) > 1
    items = [item for file in files for item in reader.items(file, _stem(file), named=several)]
    if about is not None and about.item:
        assert described is not None
        items += reader.rows(described, enumerate(about.item, 1), _stem(described), named=False)
    n_bad, kind, settings = len(reader.bad), reader.kind, dict(reader.settings)
    dev_items = [item for file in dev for item in reader.items(file, _stem(file), named=True)]
    if kind is None:
        raise NapkinError(f"'{files[0] if files else described}' has no item that can be scored: correct it")
    return Task(
        "",
        kind,
        tuple(items),
        tuple(dev_items),
        left_out=tuple(reader.bad[:n_bad]),
        files=digests([*files, *([] if described is None else [described])]),
        dev_files=digests(dev),
        **settings,
    )


def digests(paths: Sequence[Path]) -> dict[str, str]:
    """The SHA-256 of each file, by its name with that of its folder."""
    return {
        f"{path.resolve().parent.name}/{path.name}": hashlib.sha256(
            read_bounded(path, _MOST_BYTES, what="a task file")
        ).hexdigest()
        for path in paths
    }


class _Reader:
    """Makes items of rows, which all have one kind."""

    def __init__(self, about: TaskFile | None, *, skip_bad: bool) -> None:
        self._about, self._skip_bad = about, skip_bad
        self.kind: Kind | None = None
        self.settings: Mapping[str, Any] = {}
        self.bad: list[str] = []

    def items(self, path: Path, section: str, *, named: bool) -> list[Item]:
        text = read_text(path)
        suffix = path.suffix.lower()
        if suffix == ".jsonl":
            return self.rows(path, json_rows(path, text), section, named=named)
        if suffix != ".csv":
            raise NapkinError(f"'{path}' is not a task file: name a .jsonl, .csv or .toml file")
        numbered, is_mmlu = _csv_rows(path, text)
        return self.rows(path, numbered, section, named=named, is_mmlu=is_mmlu)

    def rows(self, path: Path, numbered: Any, section: str, *, named: bool, is_mmlu: bool = False) -> list[Item]:
        found = []
        for line, row in numbered:
            name = f"{section}/{line}" if named else str(line)
            try:
                kind, item = self._item(row, name, section, is_mmlu=is_mmlu)
                if self.kind not in (None, kind):
                    raise NapkinError(f"it is of kind {kind}, the rows before are of kind {self.kind}: use one kind")
                self.kind = kind
            except (KeyError, NapkinError, TypeError, ValueError, AttributeError) as error:
                what = f"it has no {error}" if isinstance(error, KeyError) else first_line(error)
                complaint = f"'{path}' line {line}: {what}"
                if not self._skip_bad:
                    raise NapkinError(
                        complaint if isinstance(error, NapkinError) else f"{complaint}: correct it"
                    ) from None
                self.bad.append(complaint)
                continue
            if named and not item.section:
                item = replace(item, section=section)
            found.append(item)
        return found

    def _item(self, row: Any, name: str, section: str, *, is_mmlu: bool) -> tuple[Kind, Item]:
        if is_mmlu:
            self.settings = {"description": MMLU_DESCRIPTION}
            return "choice", read_mmlu(row, name, section)
        known = format_of(row) if self._about is None or self._about.prompt is None else None
        if known is not None:
            self.settings = known.settings
            item = known.read(row, name)
            asked = None if self._about is None else self._about.kind
            if asked not in (None, known.kind):
                raise NapkinError(
                    f"it is of {known.name}, whose kind is {known.kind}: leave kind out, or give a prompt"
                )
            return known.kind, replace(item, group=str(row.get("group", item.group)))
        return _own(row, name, self._about or TaskFile())


def _own(row: Mapping[str, Any], name: str, about: TaskFile) -> tuple[Kind, Item]:
    beside: dict[str, Any] = {key: str(row[key]) for key in ("section", "group") if row.get(key) not in (None, "")}
    name = str(row.get("id") or name)
    if "good" in row and "bad" in row:
        return "pair", Item(name, "", (text_of(row, "good"), text_of(row, "bad")), **beside)
    if about.prompt is None:
        prompt = text_of(row, "prompt" if "prompt" in row else "question")
    else:
        prompt = _COLUMN.sub(lambda found: str(row[found[1]]), about.prompt)
    choices: tuple[str, ...]
    if isinstance(about.choices, list):
        choices = tuple(text_of(row, column) for column in about.choices)
    elif (column := about.choices or "choices") in row:
        choices = tuple(texts_of(row, column))
    else:
        choices = tuple(str(row[key]) for key in row if key.startswith("choice") and row[key] not in (None, ""))
    answer = row[about.answer]
    if about.kind in GENERATED or not choices:
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise NapkinError(f"'{about.answer}' is {type(answer).__name__}: use text or a number")
        if about.kind in ("choice", "pair"):
            raise KeyError("choices")
        kind: Kind = "exact"
        for each in (*GENERATED, "last_word"):
            kind = each if each == about.kind else kind
        if kind in _CHECKS:
            _CHECKS[kind](str(answer))
        return kind, Item(name, prompt, answer=str(answer), shown=str(answer), **beside)
    right = _right(answer, choices)
    if about.letters:
        return "choice", replace(lettered(name, prompt, choices, right, ""), **beside)
    return "choice", Item(name, prompt, choices, right, shown=choices[right], **beside)


def _right(answer: Any, choices: tuple[str, ...]) -> int:
    """The number of the right choice, named by its text, its letter or its number from 0."""
    if answer in choices:
        return choices.index(answer)
    text = str(answer).strip()
    if len(text) == 1 and text in LETTERS[: len(choices)]:
        return LETTERS.index(text)
    if not isinstance(answer, bool) and text.isascii() and text.isdigit() and int(text) < len(choices):
        return int(text)
    raise NapkinError(f"the answer is {text!r}: name one of {len(choices)} choices, its letter or its number from 0")


def read_text(path: StrPath) -> str:
    """The text of a file of rows. Raises NapkinError where it is too large or not UTF-8."""
    data = read_bounded(path, _MOST_BYTES, what="a task file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise NapkinError(f"'{path}' is not UTF-8 at byte {error.start}: convert it") from None


def json_rows(path: StrPath, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The objects of JSONL with their lines, from 1. Raises NapkinError for a line that is none."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise NapkinError(f"'{path}' line {number} is not JSON ({first_line(error)}): correct it") from None
        if not isinstance(row, dict):
            raise NapkinError(f"'{path}' line {number} is not a JSON object: write one per line")
        yield number, row


def _csv_rows(path: Path, text: str) -> tuple[list[tuple[int, Any]], bool]:
    """Rows with their numbers, and whether they are MMLU's, which have no headings."""
    try:
        rows = [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if row]
    except csv.Error as error:
        raise NapkinError(f"'{path}' is not CSV ({error}): correct it") from None
    if not rows:
        raise NapkinError(f"'{path}' is empty: give a row per item")
    if "answer" not in [cell.strip() for cell in rows[0]] and len(rows[0]) >= 4:
        for number, row in enumerate(rows, 1):
            if len(row) != len(rows[0]):
                raise NapkinError(f"'{path}' row {number} has {len(row)} cells, the first {len(rows[0])}: correct it")
        return list(enumerate(rows, 1)), True
    headings = [cell.strip() for cell in rows[0]]
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(headings):
            raise NapkinError(f"'{path}' row {number} has {len(row)} cells, the headings {len(headings)}: correct it")
    return [(number, dict(zip(headings, row, strict=True))) for number, row in enumerate(rows[1:], 2)], False


def _stem(path: Path) -> str:
    return _SPLIT.sub("", path.stem)
