"""What runs in the process of a reward function of the user's: lines of JSON, an answer and a reference in, a reward
out."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from napkin.grading.sandbox.confinement import can_confine, confine, limit_resources


def main() -> None:
    """Load the function that the first line names, give up what it does not need, and answer the lines that follow."""
    told = json.loads(sys.stdin.buffer.readline())
    limit_resources(told["memory"], told["seconds"])
    answers = sys.stdout
    sys.stdout = sys.stderr
    try:
        function = _loaded(told["path"], told["name"])
        _write(answers, {"loaded": True})
    except BaseException as error:
        _write(answers, {"error": f"{type(error).__name__}: {str(error)[:200]}"})
        return
    if can_confine():
        confine("reading")
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        try:
            reward = function(asked["answer"], asked["reference"])
            if not isinstance(reward, bool | int | float):
                reward = reward.item() if hasattr(reward, "item") else reward
            if not isinstance(reward, bool | int | float):
                raise TypeError(f"the reward is of type {type(reward).__name__}: a number is needed")
            _write(answers, {"reward": repr(float(reward))})
        except Exception as error:
            _write(answers, {"error": f"{type(error).__name__}: {str(error)[:200]}"})


def _loaded(path: str, name: str) -> Callable[[str, str], Any]:
    import runpy

    sys.path.append(os.path.dirname(path))
    function = runpy.run_path(path).get(name)
    if not callable(function):
        raise NameError(f"it has no function {name}")
    return function


def _write(stream: TextIO, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()
