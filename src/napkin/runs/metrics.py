"""metrics.jsonl: one line per logged step, appended while a run trains. The one declaration of what a line holds.

Besides its metrics a line has the step of the line before it, `previous_step`, and ends in its checksum, `crc32`. So
damaged, missing, repeated and displaced lines are all noticed. Lines of older runs have neither.

metrics.damaged.jsonl keeps damaged lines, with what was wrong with them. It is only added to.

    {"line": 17, "after_step": 16, "reason": "its checksum is ...", "content": "{\"step\": 1w, ..."}

`content` has a character per byte of the line (ISO 8859-1), so that the bytes can be restored.

Each checkpoint has the `History` of its run, beside weights and optimizer state: what later steps need of past ones, as
the losses from which spikes stand out.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import statistics
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from napkin.errors import NapkinError, first_line
from napkin.files import atomic_write_bytes, sync_file
from napkin.json_files import LARGEST, add_checksum, read_if_present, refuse_unknown, verify_checksum

DAMAGED_FILE = "metrics.damaged.jsonl"


@dataclass(frozen=True)
class DamagedLine:
    """A line of metrics.jsonl that is left out."""

    number: int
    """The line's number, from 1."""
    after_step: int
    """The step of the last intact line before it."""
    reason: str
    content: bytes


def keep_aside(metrics: Path, lines: Iterable[DamagedLine]) -> None:
    """Add lines to the file beside `metrics`, synced to the disk; those that a killed process had added are not
    repeated."""
    path = metrics.with_name(DAMAGED_FILE)
    before = read_if_present(path) or b""
    known, new = set(before.splitlines(keepends=True)), list[bytes]()
    for each in lines:
        content = each.content.decode("latin-1")
        record = {"line": each.number, "after_step": each.after_step, "reason": each.reason, "content": content}
        new.append(json.dumps(record).encode() + b"\n")
    new = [line for line in new if line not in known]
    if not new:
        return
    # A line that a kill cut off is ended first.
    begin = b"" if before.endswith(b"\n") or not before else b"\n"
    with open(path, "ab") as file:
        file.write(begin + b"".join(new))
        file.flush()
        os.fsync(file.fileno())


def count_kept_aside(metrics: Path) -> tuple[int, set[int]]:
    """Count the damaged lines that were set aside, and list the steps after which they came."""
    steps: set[int] = set()
    lines = [line for line in (read_if_present(metrics.with_name(DAMAGED_FILE)) or b"").splitlines() if line.strip()]
    for line in lines:
        # This file may be damaged too: it is only used to explain a gap.
        with contextlib.suppress(ValueError, RecursionError, KeyError):
            step = msgspec.json.decode(line, type=dict[str, Any])["after_step"]
            if isinstance(step, int):
                steps.add(step)
    return len(lines), steps


METRICS_FILE = "metrics.jsonl"
_PREVIOUS = "previous_step"
_MOST_NAMED = 5

_Natural = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Figure = Annotated[float, msgspec.Meta(ge=-LARGEST, le=LARGEST)]
_Positive = Annotated[float, msgspec.Meta(ge=0, le=LARGEST)]


@dataclass(frozen=True)
class StepMetrics:
    """A line of metrics.jsonl. NaN is a figure that was not finite or is not known: null in the file."""

    step: _Natural
    """Updates done."""
    tokens: _Natural
    """Tokens trained on."""
    loss: _Figure
    """Nats per token, over the batch, before the update."""
    learning_rate: _Figure
    gradient_norm: _Figure
    """The norm before clipping."""
    seconds: _Positive
    """Seconds since the start of the run; time between a kill and a resume left out."""
    step_seconds: _Positive
    tokens_per_second: _Positive
    mfu: _Positive
    """Model-FLOPs utilisation: counted FLOPs per second over this machine's measured matmul peak."""
    bytes: _Natural
    """Resident bytes of the process; on a GPU the peak of its allocated bytes. 0 if unknown."""
    validation_loss: _Figure | None = None
    spike: _Figure | None = None
    """How far the loss is above the recent ones, in robust standard deviations; None if it is not a spike: see
    `napkin.runs.metrics`."""
    skipped: str | None = None
    """The reason if the update was skipped."""
    expert_tokens: list[list[_Natural]] | None = None
    """Tokens routed to each expert in the step, by layer; None without experts."""
    dropped_tokens: list[_Natural] | None = None
    """Routed tokens that were dropped because their expert was full, by layer."""
    epochs: _Positive | None = None
    """Tokens trained on, divided by the tokens of the training files; None in runs of before."""
    figures: dict[str, _Figure | None] | None = None
    """Further metrics of a step of fine-tuning by name, such as reward or entropy; those of its evaluation begin with
    "held-out"."""

    def __post_init__(self) -> None:
        layers = self.expert_tokens
        if layers is not None and (not layers or not layers[0] or {*map(len, layers)} != {len(layers[0])}):
            raise ValueError("expert_tokens needs the same number of experts in each layer, one or more")
        if self.dropped_tokens is not None and len(self.dropped_tokens) != len(layers or []):
            raise ValueError("dropped_tokens needs a number for each layer of expert_tokens")

    @property
    def n_experts(self) -> tuple[int, int] | None:
        """Layers with experts and experts of each; None without experts."""
        return None if self.expert_tokens is None else (len(self.expert_tokens), len(self.expert_tokens[0]))

    @property
    def is_notable(self) -> bool:
        """True if the line is logged whatever log_every says."""
        return self.validation_loss is not None or self.spike is not None or self.skipped is not None


class MetricsFile:
    """Appends to a run's metrics.jsonl; a resumed run first drops the lines past its checkpoint."""

    def __init__(self, run: Path, *, writes: bool = True) -> None:
        # Rank 0 writes; for the other ranks there is no file.
        self.path = run / METRICS_FILE if writes else Path(os.devnull)
        self.last_step = 0
        """Step of the last line."""

    def rewind(self, step: int, *, last_logged: int = 0) -> list[str]:
        """Keep the lines up to `step`, and return messages about what was found.

        `last_logged` is the step of the last line that a checkpoint of `step` has seen. Damaged lines are moved to
        metrics.damaged.jsonl; an incomplete line, which a kill may leave, is dropped if it is past the checkpoint.
        """
        record = read_metrics_record(self.path)
        kept = [line for line in record.lines if line.metrics.step <= step]
        end = kept[-1].metrics.step if kept else 0
        messages = record.messages(kept_aside=True)
        damaged = list(record.damaged)
        if record.incomplete is not None and end < last_logged:
            # Lines up to a checkpoint were on the disk before it.
            damaged.append(record.incomplete)
            messages.append(_describe_damage(self.path, [record.incomplete], kept_aside=True))
        elif record.incomplete is not None:
            messages.append(f"{record.describe_incomplete()}: it is dropped, and its step trained again")
        if end < last_logged and not damaged and end not in record.damaged_after:
            messages.append(f"'{self.path}' ends at step {end:,}: the lines up to step {last_logged:,} are missing")
        keep_aside(self.path, damaged)
        data = b"".join(line.content + b"\n" for line in kept)
        # A file that needs no change is not written, so that a run can resume on a full disk.
        if read_if_present(self.path) != data:
            atomic_write_bytes(self.path, data, overwrite=True)
        self.last_step = max(end, last_logged)
        return messages

    def append(self, metrics: StepMetrics) -> None:
        """Append one line. Raises NapkinError where the disk is full."""
        line = f"{add_checksum(json.dumps({**_values(metrics), _PREVIOUS: self.last_step}))}\n".encode()
        try:
            # One write per line: a kill cuts off at most the last line. A full disk may accept only a part of it.
            with open(self.path, "ab", buffering=0) as file:
                while line:
                    line = line[file.write(line) :]
        except OSError as error:
            raise NapkinError(
                f"'{self.path}' cannot be written ({error.strerror}) after step {metrics.step}: make room and continue "
                f"with `napkin resume {self.path.parent}`, earlier checkpoints are kept"
            ) from None
        self.last_step = metrics.step

    def sync(self) -> None:
        """Return when all lines are on the disk."""
        if self.path.is_file():
            sync_file(self.path)


def read_metrics(path: Path) -> Iterator[StepMetrics]:
    """The intact lines of a metrics.jsonl, in order; none where there is no file. Damage is a warning."""
    record = read_metrics_record(path)
    for message in record.messages():
        warnings.warn(message, stacklevel=2)
    yield from record.metrics


@dataclass(frozen=True)
class LoggedLine:
    """An intact line of metrics.jsonl."""

    metrics: StepMetrics
    number: int
    previous_step: int | None
    """Step of the line that was logged before it; None in a line of an older run, which has no checksum."""
    content: bytes


@dataclass(frozen=True)
class MetricsRecord:
    """Everything that is known about a metrics.jsonl."""

    path: Path
    lines: list[LoggedLine] = field(default_factory=list)
    """The intact lines, by step."""
    damaged: list[DamagedLine] = field(default_factory=list)
    incomplete: DamagedLine | None = None
    """The last line, if a kill or a power cut could have left it so."""
    displaced: LoggedLine | None = None
    """The first line that follows one of a later step."""
    kept_aside: int = 0
    """Number of lines that were moved to metrics.damaged.jsonl."""
    damaged_after: frozenset[int] = frozenset()
    """Steps of the lines that precede damaged ones, in this file or set aside."""
    left_out: int = 0
    """Number of lines that were not parsed: a page that shows a long run reads a part of them."""

    @property
    def metrics(self) -> tuple[StepMetrics, ...]:
        return tuple(line.metrics for line in self.lines)

    def messages(self, *, kept_aside: bool = False) -> list[str]:
        """The defects, a line each: damaged, displaced and missing lines; not an incomplete last line.

        `kept_aside` is whether the damaged ones are being moved to metrics.damaged.jsonl.
        """
        messages = [_describe_damage(self.path, self.damaged, kept_aside=kept_aside)] if self.damaged else []
        if self.kept_aside:
            lines = "1 damaged line is" if self.kept_aside == 1 else f"{self.kept_aside:,} damaged lines are"
            messages.append(f"{lines} kept in '{self.path.with_name(DAMAGED_FILE)}', not in '{self.path}'")
        if self.displaced is not None:
            number, step = self.displaced.number, self.displaced.metrics.step
            messages.append(
                f"'{self.path}', line {number} (step {step:,}) follows a later step: lines are read by step"
            )
        gaps, before = list[tuple[int, int]](), 0
        for line in self.lines:
            missing = line.previous_step is not None and line.previous_step != before
            if missing and before not in self.damaged_after:
                gaps.append((before, line.metrics.step))
            before = line.metrics.step
        messages += [
            f"'{self.path}': lines between steps {after:,} and {before:,} are missing"
            for after, before in gaps[:_MOST_NAMED]
        ]
        if len(gaps) > _MOST_NAMED:
            messages.append(f"'{self.path}': lines are missing at {len(gaps) - _MOST_NAMED:,} more places")
        return messages

    def describe_incomplete(self) -> str:
        assert self.incomplete is not None
        return f"'{self.path}', line {self.incomplete.number}, is incomplete, as a killed process leaves it"


def read_metrics_record(path: Path) -> MetricsRecord:
    """Read a metrics.jsonl, whatever is in it; without lines where there is no file.

    Raises NapkinError only where it cannot be read at all.
    """
    by_step: dict[int, LoggedLine] = {}
    damaged: list[DamagedLine] = []
    incomplete = displaced = n_experts = None
    last, checked = 0, False
    contents = (read_if_present(path) or b"").split(b"\n")
    for number, content in enumerate(contents, 1):
        if not content.strip():
            continue
        try:
            line = _parse_line(content, number, checked=checked)
            n_experts = n_experts or line.metrics.n_experts
            if line.metrics.n_experts not in (None, n_experts):
                raise ValueError(f"layers and experts are {line.metrics.n_experts}, {n_experts} in lines before it")
        except (ValueError, RecursionError) as error:
            spoiled = DamagedLine(number, last, first_line(error), content)
            # A line that a kill cut off is not JSON; a line that is JSON, but has wrong values or a wrong checksum, was
            # damaged.
            is_json = isinstance(error, msgspec.ValidationError)
            if number == len(contents) and not is_json and isinstance(error, msgspec.DecodeError | UnicodeDecodeError):
                incomplete = spoiled
            else:
                damaged.append(spoiled)
            continue
        step = line.metrics.step
        if line.previous_step is None:
            # An older run that resumed from a checkpoint could repeat steps: the later lines are those of the model.
            while by_step and next(reversed(by_step)) >= step:
                by_step.popitem()
        else:
            checked = True
        if (known := by_step.get(step)) is not None:
            loser, kept = (line, known) if line.content == known.content else (known, line)
            reason = f"step {step:,} is logged again in line {kept.number}"
            damaged.append(DamagedLine(loser.number, step, reason, loser.content))
            by_step[step] = kept
            continue
        if step < last and line.previous_step is not None and displaced is None:
            displaced = line
        by_step[step] = line
        last = step
    kept_aside, after = count_kept_aside(path)
    return MetricsRecord(
        path,
        lines=[by_step[step] for step in sorted(by_step)],
        damaged=damaged,
        incomplete=incomplete,
        displaced=displaced,
        kept_aside=kept_aside,
        damaged_after=frozenset(after | {line.after_step for line in damaged}),
    )


def _parse_line(content: bytes, number: int, *, checked: bool) -> LoggedLine:
    """Parse a line; `checked` is whether one before it has a checksum. Raises ValueError or RecursionError."""
    if verify_checksum(content):
        tail = _TAIL.search(content)
        if tail is None:
            raise ValueError(f"it has no field {_PREVIOUS!r}")
        return LoggedLine(parse_metrics(content), number, int(tail[1]), content)
    values = msgspec.json.decode(content, type=dict[str, Any])
    refuse_unknown(values, StepMetrics)
    metrics = parse_metrics(content)
    if checked:
        raise ValueError("it has no checksum, and a line before it has one")
    return LoggedLine(metrics, number, None, content)


_TAIL = re.compile(rb', "previous_step": (\d{1,18}), "crc32": "[0-9a-f]{8}"\}\s*\Z')


def _describe_damage(path: Path, damaged: list[DamagedLine], *, kept_aside: bool) -> str:
    named = "; ".join(f"line {line.number} ({line.reason})" for line in damaged[:_MOST_NAMED])
    more = f" and {len(damaged) - _MOST_NAMED:,} more" if len(damaged) > _MOST_NAMED else ""
    whereto = f"kept in '{path.with_name(DAMAGED_FILE)}'" if kept_aside else "left out"
    return f"'{path}': damaged {'line' if len(damaged) == 1 else 'lines'}, {whereto}: {named}{more}"


def format_metrics(metrics: StepMetrics) -> str:
    """The metrics of a step as a line of JSON."""
    return json.dumps(_values(metrics)) + "\n"


def _values(metrics: StepMetrics) -> dict[str, Any]:
    values = {name: _as_json(value) for name, value in vars(metrics).items() if value is not None}
    if metrics.figures is not None:
        values["figures"] = {name: _as_json(value) for name, value in metrics.figures.items()}
    return values


def _as_json(value: Any) -> Any:
    """JSON has neither NaN nor infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_metrics(line: str | bytes) -> StepMetrics:
    """The inverse of `format_metrics`; also reads lines of older runs, which lack some figures.

    Raises msgspec.MsgspecError where the line is not an object of JSON, or a value has the wrong type or cannot be one.
    """
    try:
        return msgspec.json.decode(line, type=StepMetrics)
    except msgspec.ValidationError:
        values = msgspec.json.decode(line, type=dict[str, Any])
        known = {name: value for name, value in values.items() if value is not None}
        absent = {name: math.nan for name in _CAN_BE_ABSENT if name not in known}
        # NaN is outside of every range.
        filled = msgspec.convert({"bytes": 0, **dict.fromkeys(_CAN_BE_ABSENT, 0.0), **known}, StepMetrics)
        return dataclasses.replace(filled, **absent)


_CAN_BE_ABSENT = ("loss", "learning_rate", "gradient_norm", "step_seconds", "tokens_per_second", "mfu")


WINDOW = 64
"""Number of recent losses that a new one is compared with."""
FEWEST = 16
"""Fewest losses for a comparison."""
THRESHOLD = 6.0
"""Robust standard deviations above the median from which a loss is a spike: one in a billion for normal noise."""

_NORMAL = 1.4826
"""Ratio of the standard deviation to the median absolute deviation of a normal distribution."""
_LEAST_DEVIATION = 0.005
"""A share of the median: where losses hardly scatter, one that is off by a percent is not a spike."""


def spike(loss: float, recent: list[float]) -> float | None:
    """How many robust standard deviations a loss is above the median of the recent ones; None if it is not a spike.

    Hampel's identifier (Davies & Gather 1993, "The identification of multiple outliers"): median and median absolute
    deviation, which a few spikes among `recent` do not move.
    """
    if len(recent) < FEWEST:
        return None
    median = statistics.median(recent)
    deviation = _NORMAL * statistics.median(abs(each - median) for each in recent)
    score = (loss - median) / max(deviation, _LEAST_DEVIATION * abs(median), 1e-12)
    return score if score > THRESHOLD else None


def remember(loss: float, recent: list[float]) -> None:
    recent.append(loss)
    del recent[:-WINDOW]


_Steps = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Loss = Annotated[float, msgspec.Meta(ge=-LARGEST, le=LARGEST)]


class History(msgspec.Struct, forbid_unknown_fields=True):
    """The metrics of past steps that later steps depend on, and all validation losses."""

    validation_losses: list[tuple[_Steps, _Loss]] = msgspec.field(default_factory=list)
    """(step, nats per token) of every evaluation."""
    recent_losses: list[_Loss] = msgspec.field(default_factory=list)
    """Losses of the last steps, for the detection of spikes."""
    skipped: _Steps = 0
    """Steps whose update was skipped."""
    skipped_in_a_row: _Steps = 0
    """Consecutive skipped steps up to the last step."""
    last_logged: _Steps = 0
    """Step of the last line of metrics.jsonl; 0 also where an older napkin wrote the checkpoint."""
    tokens: _Steps = 0
    """Tokens trained on, where steps differ in their number: in fine-tuning."""
    updates: _Steps | None = None
    """Updates of the optimizer, where a step may make several or none: in reinforcement learning. None is one for each
    step that was not skipped."""
    unfinished: str | None = None
    """The line of metrics of the last step, if a signal interrupted the evaluation after it: the evaluation is repeated
    on resuming."""

    def add_loss(self, loss: float) -> float | None:
        """Record the loss of a step whose update was made. Returns the score of a spike, otherwise None: see
        `spike`."""
        self.skipped_in_a_row = 0
        score = spike(loss, self.recent_losses)
        remember(loss, self.recent_losses)
        return score

    def forget_finished(self, metrics: Path) -> None:
        """Clear `unfinished` if its line is in the metrics file: a resumed process has finished it then."""
        if self.unfinished is None:
            return
        step = parse_metrics(self.unfinished).step
        for line in read_metrics_record(metrics).metrics:
            if line.step == step:
                self.unfinished = None
                if line.validation_loss is not None:
                    self.add_validation(step, line.validation_loss)

    def add_validation(self, step: int, loss: float) -> None:
        """Record an evaluation; one that is repeated after a resume replaces the earlier one."""
        self.validation_losses = [kept for kept in self.validation_losses if kept[0] != step]
        self.validation_losses.append((step, loss))

    def refuse_impossible(self, step: int) -> None:
        """Raise ValueError for values that a run cannot have had after `step` steps."""
        for name, value in (
            ("skipped", self.skipped),
            ("skipped_in_a_row", self.skipped_in_a_row),
            ("last_logged", self.last_logged),
            ("validation_losses", max((step for step, _ in self.validation_losses), default=0)),
        ):
            if value > step:
                raise ValueError(f"history.{name} is of {value:,} steps, the checkpoint of {step:,}")
        if len(self.recent_losses) > WINDOW:
            raise ValueError(f"history.recent_losses has {len(self.recent_losses):,} losses, at most {WINDOW} are kept")
        if self.unfinished is not None:
            try:
                unfinished = parse_metrics(self.unfinished).step
            except (ValueError, RecursionError) as error:
                raise ValueError(f"history.unfinished is not a line of metrics ({first_line(error)})") from None
            if unfinished != step:
                raise ValueError(f"history.unfinished is of step {unfinished:,}, the checkpoint of {step:,}")

    def copy(self) -> "History":
        """A copy that shares nothing with this one."""
        return msgspec.convert(msgspec.to_builtins(self), History)


def best_step(losses: dict[int, float], steps: list[int]) -> int | None:
    """The step among `steps` with the lowest finite loss, the earliest of equals; None where no loss is known."""
    known = [step for step in sorted(steps) if math.isfinite(losses.get(step, math.nan))]
    return min(known, key=losses.__getitem__, default=None)
