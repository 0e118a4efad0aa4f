"""What the model of `examples/learn_tools.py` is taught, and that rewards alone make it call the calculator."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from napkin.environments.environment import is_held_out
from napkin.grading.sandbox.confinement import can_confine
from napkin.runs import read_metrics

EXAMPLE = Path(__file__).parents[1] / "examples" / "learn_tools.py"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


def test_a_fifth_of_what_is_taught_calls_and_nothing_of_it_is_asked_in_the_evaluation(
    example: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "products.py").write_text(example["ENVIRONMENT"])
    environment = f"{tmp_path}/products.py:Products"
    lines = [json.loads(line)["messages"] for line in example["conversations"](environment, 2000, held_out=False)]
    calls = [each for each in lines if len(each) == 4]
    assert abs(len(calls) / len(lines) - example["CALLS"]) < 0.04
    for question, call, told, answer in calls:
        first, second = map(int, question["content"][:-1].split("*"))
        assert re.fullmatch(rf"<calculator>{first}\*{second}</calculator>", call["content"])
        assert told == {"role": "tool", "content": str(first * second)}
        assert answer["content"] == told["content"]
    right = 0
    for question, *_, answer in (each for each in lines if len(each) == 2):
        first, second = map(int, question["content"][:-1].split("*"))
        right += int(answer["content"]) == first * second
    assert right < 5
    assert not any(is_held_out(each[0]["content"][:-1]) for each in lines)


@pytest.mark.torture
@pytest.mark.skipif(not can_confine(), reason="the system has no filter of system calls")
def test_a_model_that_is_rewarded_for_right_answers_learns_to_call(
    example: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example["main"](["--folder", str(tmp_path / "tools")])
    figures = [line.figures or {} for line in read_metrics(tmp_path / "tools" / "rewarded" / "metrics.jsonl")]
    first, last = (
        sum(each.get("part tool calls") or 0 for each in part) / len(part) for part in (figures[:3], figures[-5:])
    )
    assert first < 0.35
    assert last > 0.9
    assert sum(each["reward"] or 0 for each in figures[-5:]) / 5 > 0.85
    assert (figures[0]["held-out reward"] or 0) < 0.1 < 0.9 < (figures[-1]["held-out reward"] or 0)
    assert len(re.findall(r"^\| \d+ \|", capsys.readouterr().out, re.MULTILINE)) == 4
