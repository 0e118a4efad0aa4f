"""Starts `napkin` commands in milliseconds: each is a fork of this process, which has imported what they need and run
nothing.

A command is a line of JSON on standard input, the answer a line on standard output. What runs is `napkin.cli.main` in
a process of its own, with its own exit status: it can be killed, signalled and limited like any other.
"""

import gc
import importlib
import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

IMPORTED = (
    "encodings.unicode_escape",
    "napkin.cli.evaluate.text",
    "napkin.cli.plan.budget",
    "napkin.cli.models.generate",
    "napkin.cli.plan.recipe",
    "napkin.cli.train.runs",
    "napkin.cli.train.train",
    "napkin.cli.train.following",
    "napkin.training.callbacks",
    "napkin.training.run",
    "numpy.ctypeslib",
    "numpy.ma",
    "rich._emoji_codes",
    "torch.profiler",
    "tyro._backends._tyro_backend",
    "typeguard",
)


def main() -> None:
    """Answer requests until standard input ends: start a command, or wait for one."""
    warm_up()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = start(request)
        print(json.dumps(answer), flush=True)


def warm_up() -> None:
    """Import what commands import, and no more: a process with threads must not fork."""
    for name in IMPORTED:
        importlib.import_module(name)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    importlib.import_module("reliability.ranks").import_for_ranks()
    from napkin.accounting import scratch
    from napkin.model.config import ModelConfig
    from napkin.recipe.precision import Precision
    from napkin.recipe.recipe import Recipe
    from napkin.recipe.resolved import ResolvedRecipe
    from napkin.recipe.training_config import TrainingConfig
    from napkin.train_step.step_ledger import count_step

    # The first tracing imports half of torch; where no scratch is measured nothing computes, and no thread is born.
    measure, scratch._measure = scratch._measure, lambda *_: None
    model = ModelConfig(vocab_size=8, context_length=4, d_model=8, n_layers=1, n_heads=2)
    count_step(ResolvedRecipe(Recipe(model=model, training=TrainingConfig(batch_size=2)), Precision("bf16", "cpu")))
    scratch._measure = measure
    scratch._by_machine.clear()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads at the fork"
    # A metered step collects garbage before it, of which what is imported is none.
    gc.collect()
    gc.freeze()


def start(request: dict[str, Any]) -> int:
    """Fork; the child becomes the command and this process returns its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        become(request)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def become(request: dict[str, Any]) -> None:
    """Run the command with its own streams, folder and limits."""
    os.chdir(request["folder"])
    # As `python -m` does.
    sys.path.insert(0, request["folder"])
    os.environ.update(request["environment"])
    # Whatever started the server may have ignored Ctrl-C, as a shell does in the background, or SIGHUP, as nohup does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    for number, name in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(descriptor, number)
        os.close(descriptor)
    if request["largest_file"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["largest_file"], request["largest_file"]))
    if request["signal_at"] is not None:
        signal_at(request["signal_at"], request["near"], request["after"], signal.Signals(request["signal"]))
    if request["after_step"] is not None:
        signals_after_step(request["after_step"], [signal.Signals(each) for each in request["signals"]])
    if request["refuse_pickles"]:
        refuse_pickles()
    status = 0
    if request["program"] is not None:
        try:
            exec(compile(request["program"], "<string>", "exec"), {"__name__": "__main__"})
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
    else:
        from napkin.cli import main as napkin

        status = napkin(request["arguments"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def refuse_pickles() -> None:
    """End this process where it would let a pickle name what is to be called."""

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            sys.stderr.write(f"a pickle asks for {arguments}\n")
            sys.stderr.flush()
            os._exit(3)

    sys.addaudithook(look)


def signal_at(number: int, near: str, after: str, what: signal.Signals) -> None:
    """Signal this process before its `number`-th operation on a file whose path contains `near`.

    They are counted from the first one on whose path contains `after`.
    """
    done, begun = 0, False

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal done, begun
        if event not in ("open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "os.chmod"):
            return
        paths = [str(argument) for argument in arguments if isinstance(argument, str | os.PathLike)]
        begun = begun or any(after in path for path in paths)
        if begun and any(near in path for path in paths):
            done += 1
            if done == number:
                os.kill(os.getpid(), what)

    sys.addaudithook(look)


def signals_after_step(step: int, signals: list[signal.Signals]) -> None:
    """Signal this process when a step is computed, before its evaluation and its line of metrics."""
    from napkin.training.pretraining import Evaluation

    evaluated = Evaluation.after_step

    def after_step(self: Any, loop: Any, metrics: Any) -> Any:
        if loop.step == step:
            for each in signals:
                os.kill(os.getpid(), each)
        return evaluated(self, loop, metrics)

    Evaluation.after_step = after_step


if __name__ == "__main__":
    main()
