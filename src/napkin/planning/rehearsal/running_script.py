"""The child process of a rehearsal: it runs the script among stand-ins, and writes what was counted as JSON."""

import argparse
import dataclasses
import gc
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from napkin.planning.rehearsal.messages import EXITS, Answer, Request

_OPEN, _REPLACE = open, os.replace
"""The original functions, before `AbsentFiles` replaces them."""


def main() -> None:
    """Run the script of the request, the only argument."""
    request = msgspec.json.decode(sys.argv[1].encode(), type=Request)
    _write(request, _run(request))
    sys.stdout.flush()
    os._exit(0)


def _write(request: Request, answer: Answer) -> None:
    with _OPEN(request.answer + ".part", "wb") as file:
        file.write(msgspec.json.encode(answer))
    _REPLACE(request.answer + ".part", request.answer)


def _run(request: Request) -> Answer:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from napkin.accounting.compiled.programs import compiling_without_kernels
    from napkin.accounting.counting import fake_tensors_log_nothing
    from napkin.accounting.cuda.trace import as_on_cuda
    from napkin.hardware.cluster import find_cluster
    from napkin.hardware.target import CudaTarget, as_in_release
    from napkin.planning.rehearsal.absent_files import AbsentFiles
    from napkin.planning.rehearsal.recorder import Rehearsed, ScriptRecorder
    from napkin.planning.rehearsal.stand_ins import DeviceMode, StandIns
    from napkin.planning.step.machine import target_of

    cluster = find_cluster(request.on)
    target = target_of(cluster.device)
    cuda = as_in_release(target if isinstance(target, CudaTarget) else CudaTarget(), request.torch)
    source = Path(request.script).read_text(encoding="utf-8", errors="replace")
    stand_ins, files = StandIns(cluster, str(Path(request.script).parent)), AbsentFiles(Path(request.folder), source)
    stand_ins.install()
    if request.torch is None and cuda.rms_norm_in_fp32 and _names_rms_norm(source):
        stand_ins.note("F.rms_norm widens to fp32 in autocast, as of torch 2.12: --torch 2.11 counts without, and less")
    asked = _watch_environment(request.script)
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def answer(obstacle: dict[str, str] | None) -> Answer:
        ledger = recorder.counted
        if ledger is not None:
            rows = tuple(dataclasses.replace(row, call=None) for row in ledger.rows)
            ledger = dataclasses.replace(ledger, rows=rows)
        return Answer(
            ledger=ledger,
            highest=None if ledger is None else recorder.highest(),
            obstacle=obstacle if ledger is None else None,
            updates=recorder.n_updates,
            on_host=recorder.trains_on_host,
            notes=list(stand_ins.notes),
            absent=list(files.made),
            environment=asked,
        )

    tell = lambda: _write(request, answer(None))  # noqa: E731
    recorder = ScriptRecorder(mode, cuda, seconds=request.seconds, tell=tell)
    stand_ins.tracing.called = recorder.enter_compiled
    stand_ins.mode = DeviceMode(recorder, default=request.all_on_device or None)
    obstacle = None
    files.install()
    sys.path[0] = str(Path(request.script).parent)
    sys.argv = [request.script, *request.arguments]
    argparse.ArgumentParser.error = _refuse_arguments  # pyright: ignore[reportAttributeAccessIssue]
    # torch's own objects live as long as this process: without them, collections take a tenth of the time.
    gc.freeze()
    try:
        compiling = compiling_without_kernels(cuda, mode, stand_ins.tracing.cannot_lower)
        with as_on_cuda(cuda), mode, compiling, recorder.watching(), stand_ins.mode, fake_tensors_log_nothing():
            if request.setup is not None:
                runpy.run_path(request.setup, run_name="napkin_setup")
            runpy.run_path(request.script, run_name="__main__")
    except Rehearsed:
        pass
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            why = f"status {leaving.code}" if isinstance(leaving.code, int) else str(leaving.code)
            obstacle = {**_obstacle(leaving, request), "error": f"{EXITS} {why}"[:300]}
    except BaseException as error:
        traceback.print_exc()
        obstacle = _obstacle(error, request)
    recorder.end()
    return answer(obstacle)


def _refuse_arguments(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    raise SystemExit(f"for its arguments: {message}")


def _names_rms_norm(source: str) -> bool:
    """True if the source of a script names torch's root-mean-square normalisation, and autocast."""
    return "autocast" in source and ("rms_norm" in source or "nn.RMSNorm" in source)


def _obstacle(error: BaseException, request: Request) -> dict[str, str]:
    """The error, the line of the script that it came from, and what helps."""
    from napkin.errors import first_line

    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename in (request.script, request.setup)]
    folder = str(Path(request.script).parent)
    own = own or [frame for frame in frames if frame.filename.startswith(folder)]
    place = f"{Path(own[-1].filename).name}:{own[-1].lineno}: {(own[-1].line or '').strip()[:100]}" if own else ""
    text = f"{type(error).__name__}: {first_line(error)}"
    return {"error": text[:300], "place": place, "hint": _hint(error)}


def _hint(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "it").partition(".")[0]
        return (
            f"install {name}, or let a file of --setup stand in for it: import sys, types; "
            f"m = sys.modules['{name}'] = types.ModuleType('{name}'); m.NAME = ..."
        )
    if isinstance(error, SystemExit):
        return "give the arguments that it needs after `--`, or let a file of --setup replace what ends it"
    if isinstance(error, OSError):
        return "put a small file there, or let a file of --setup replace the function that reads it"
    if "Dynamic" in type(error).__name__ or "DataDependent" in type(error).__name__:
        return (
            "its result depends on values that fake tensors lack: let a file of --setup replace the function around it"
        )
    return "let a file of --setup, which is run before the script, replace the function that fails"


def _watch_environment(script: str) -> dict[str, str | None]:
    """Note the environment variables that the script and what lies beside it read, with the values that they got."""
    asked: dict[str, str | None] = {}
    folder = str(Path(script).parent) + os.sep
    kind: Any = type(os.environ)
    get = kind.__getitem__

    def read(environment: Any, name: str) -> str:
        frame = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") in ("os", "collections.abc", "_collections_abc"):
            frame = frame.f_back
        inside = frame is not None and frame.f_code.co_filename.startswith(folder)
        try:
            value = get(environment, name)
        except KeyError:
            if inside:
                asked.setdefault(name, None)
            raise
        if inside:
            asked.setdefault(name, value)
        return value

    kind.__getitem__ = read
    return asked
