"""metrics.jsonl when its bytes are not what was written: every damage is named, nothing is dropped without a line."""

import dataclasses
import json
import random
import zlib
from pathlib import Path

import pytest

from napkin.runs.metrics import (
    DAMAGED_FILE,
    MetricsFile,
    StepMetrics,
    format_metrics,
    read_metrics,
    read_metrics_record,
)

STEPS = 12


def metrics(step: int, loss: float = 1 / 3) -> StepMetrics:
    validation = 2.0 if step % 4 == 0 else None
    return StepMetrics(step, 10 * step, loss, 1e-3, 0.1, 2.5 * step, 0.1, 99.9, 0.5, 123, validation)


@pytest.fixture
def written(tmp_path: Path) -> MetricsFile:
    """A file of twelve lines, all of which a checkpoint has seen."""
    file = MetricsFile(tmp_path)
    for step in range(1, STEPS + 1):
        file.append(metrics(step))
    return file


def steps_of(file: MetricsFile) -> list[int]:
    return [line.step for line in read_metrics_record(file.path).metrics]


def kept_aside(file: MetricsFile) -> list[dict]:
    path = file.path.with_name(DAMAGED_FILE)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_each_line_is_json_with_the_step_before_it_and_the_checksum_of_its_bytes(written: MetricsFile) -> None:
    for step, line in enumerate(written.path.read_bytes().splitlines(), 1):
        values = json.loads(line)
        assert values["previous_step"] == step - 1
        assert list(values)[-1] == "crc32"
        assert int(values["crc32"], 16) == zlib.crc32(line.partition(b', "crc32"')[0])


@pytest.mark.thorough
def test_every_flipped_bit_is_named_with_its_line_and_kept_aside(written: MetricsFile) -> None:
    whole = written.path.read_bytes()
    draw = random.Random(0)
    newlines = [position for position, byte in enumerate(whole) if byte == ord("\n")]
    positions = sorted({*draw.sample(range(len(whole)), 300), *newlines})
    for position in positions:
        flipped = bytearray(whole)
        flipped[position] ^= 1 << draw.randrange(8)
        written.path.write_bytes(flipped)
        record = read_metrics_record(written.path)
        # No figure is another one than was written.
        assert all(line == metrics(line.step) for line in record.metrics)
        line = whole[:position].count(b"\n") + 1
        last = position == len(whole) - 1
        assert record.messages() or last
        messages = written.rewind(STEPS, last_logged=STEPS)
        assert len(messages) == 1, messages
        assert f"line {line} " in messages[0]
        assert "metrics.damaged.jsonl" in messages[0]
        content = flipped.split(b"\n")[line - 1]
        assert content.decode("latin-1") in [each["content"] for each in kept_aside(written)]
        # The next resume has nothing to add but that there are such lines.
        before = written.path.read_bytes()
        again = written.rewind(STEPS, last_logged=STEPS)
        assert len(again) == 1
        assert "kept in" in again[0]
        assert written.path.read_bytes() == before
        written.path.with_name(DAMAGED_FILE).unlink()


def test_what_was_kept_aside_is_added_to_and_never_replaced(written: MetricsFile) -> None:
    aside = written.path.with_name(DAMAGED_FILE)
    aside.write_bytes(b"a note of the user's own, without an end")
    for step in (3, 5):
        text = written.path.read_text()
        written.path.write_text(text.replace(f'"step": {step},', f'"step": {step}9,', 1))
        written.rewind(STEPS, last_logged=STEPS)
    lines = aside.read_bytes().splitlines()
    assert lines[0] == b"a note of the user's own, without an end"
    assert [json.loads(line)["after_step"] for line in lines[1:]] == [2, 4]
    assert read_metrics_record(written.path).messages() == [
        f"3 damaged lines are kept in '{aside}', not in '{written.path}'"
    ]


def test_missing_lines_are_said_wherever_they_are(written: MetricsFile) -> None:
    lines = written.path.read_text().splitlines(keepends=True)
    for missing, words in (
        ([0], "lines between steps 0 and 2 are missing"),
        ([4], "lines between steps 4 and 6 are missing"),
        ([4, 5, 6], "lines between steps 4 and 8 are missing"),
        ([10, 11], "ends at step 10: the lines up to step 12 are missing"),
        (range(12), "ends at step 0: the lines up to step 12 are missing"),
    ):
        written.path.write_text("".join(line for number, line in enumerate(lines) if number not in missing))
        (message,) = written.rewind(STEPS, last_logged=STEPS)
        assert words in message
        written.append(metrics(STEPS + 1))
        # What is missing stays known.
        assert f"{STEPS + 1} are missing" in str(read_metrics_record(written.path).messages()) or words in message


def test_lines_at_another_place_are_said_and_read_by_step(written: MetricsFile) -> None:
    lines = written.path.read_text().splitlines(keepends=True)
    lines[4], lines[7] = lines[7], lines[4]
    written.path.write_text("".join(lines))
    assert steps_of(written) == list(range(1, STEPS + 1))
    (message,) = written.rewind(STEPS, last_logged=STEPS)
    assert "line 6 (step 6) follows a later step" in message
    assert read_metrics_record(written.path).messages() == []


def test_a_repeated_line_is_said_and_kept_aside(written: MetricsFile) -> None:
    lines = written.path.read_text().splitlines(keepends=True)
    written.path.write_text("".join([*lines[:9], lines[3], *lines[9:]]))
    assert steps_of(written) == list(range(1, STEPS + 1))
    (message,) = written.rewind(STEPS, last_logged=STEPS)
    assert "line 10 (step 4 is logged again in line 4)" in message
    assert written.path.read_text() == "".join(lines)
    assert [each["line"] for each in kept_aside(written)] == [10]


def test_a_line_that_a_kill_cut_off_is_said_and_is_no_damage(written: MetricsFile) -> None:
    whole = written.path.read_bytes()
    begin = whole[:-1].rindex(b"\n") + 1
    for cut in range(begin + 1, len(whole) - 1, 7):
        written.path.write_bytes(whole[:cut])
        record = read_metrics_record(written.path)
        assert record.messages() == []
        assert record.incomplete is not None
        (message,) = written.rewind(STEPS - 1, last_logged=STEPS - 1)
        assert "line 12, is incomplete, as a killed process leaves it" in message
        assert kept_aside(written) == []


def test_a_line_that_a_checkpoint_has_seen_was_not_cut_off_by_a_kill(written: MetricsFile) -> None:
    written.path.write_bytes(written.path.read_bytes()[:-30])
    (message,) = written.rewind(STEPS, last_logged=STEPS)
    assert "damaged line, kept in" in message
    assert len(kept_aside(written)) == 1


def test_lines_of_an_older_run_are_read_and_continued_with_checksums(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.path.write_text("".join(format_metrics(metrics(step)) for step in range(1, 5)))
    before = file.path.read_bytes()
    assert file.rewind(4) == []
    assert file.path.read_bytes() == before
    file.append(metrics(5))
    assert list(read_metrics(file.path)) == [metrics(step) for step in range(1, 6)]
    # Behind a line with a checksum, one without was not written by napkin.
    with open(file.path, "a") as end:
        end.write(format_metrics(metrics(6)))
    (message,) = read_metrics_record(file.path).messages()
    assert "line 6 (it has no checksum, and a line before it has one)" in message


def test_values_that_cannot_be_figures_are_named(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    good = json.loads(format_metrics(metrics(1)))
    for name, value in (
        ("step", -1),
        ("step", 2**70),
        ("mfu", 1e308),
        ("mfu", -0.5),
        ("seconds", -1),
        ("loss", [1]),
        ("skipped", 3),
        ("expert_tokens", [[1], 2]),
        ("expert_tokens", []),
        ("expert_tokens", [[]]),
        ("expert_tokens", [[1, 2], [3]]),
        ("dropped_tokens", [0]),
        ("unheard_of", 1),
    ):
        file.path.write_text(json.dumps({**good, name: value}) + "\n")
        (message,) = read_metrics_record(file.path).messages()
        assert "line 1 (" in message
        assert name in message
    with_experts = [{**good, "step": step, "expert_tokens": [[1] * (step + 1)] * 2} for step in (1, 2)]
    file.path.write_text("".join(json.dumps(line) + "\n" for line in with_experts))
    (message,) = read_metrics_record(file.path).messages()
    assert "line 2 (layers and experts are (2, 3), (2, 2) in lines before it)" in message
    file.path.write_text('{"step": 1, "loss": ' + "[" * 100_000 + "\n")
    (message,) = read_metrics_record(file.path).messages()
    assert "line 1 (" in message


def test_damage_is_a_warning_for_those_who_read_lines(written: MetricsFile) -> None:
    written.path.write_text(written.path.read_text().replace('"loss": 0.3', '"loss": 0.4', 1))
    with pytest.warns(UserWarning, match="line 1 "):
        found = list(read_metrics(written.path))
    assert found == [metrics(step) for step in range(2, STEPS + 1)]


def test_figures_that_are_not_finite_come_back(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.append(dataclasses.replace(metrics(1), loss=float("inf")))
    (found,) = read_metrics(file.path)
    assert found.loss != found.loss
    assert found.tokens == 10
