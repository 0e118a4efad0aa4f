"""Routes of the pages of runs: the list, curves, differences, one run in words, its log; and, where actions are
allowed, starting, stopping and resuming training."""

import asyncio
import functools
import math
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from napkin.errors import NapkinError
from napkin.files import StrPath, read_bytes
from napkin.report.headline import key_figures, status_of, warnings_of
from napkin.report.page import render_report
from napkin.runs.metrics import METRICS_FILE
from napkin.runs.run_folder import is_being_trained
from napkin.runs.run_record import read_run_record
from napkin.studio.curves import telling_lines
from napkin.studio.requests import as_json, body_of, refuse_unless_allowed
from napkin.studio.run_processes import RunProcesses, blank_recipe, recipes_below
from napkin.studio.runs import RunIndex, axes
from napkin.studio.studies import Studies

MOST_NAME_BYTES = 2**20
"""The most of a request that names runs."""
MOST_POINTS = 20_000
MOST_RECIPE_BYTES = 2**18
MOST_SAMPLE_CHARACTERS = 2**16
MOST_METRICS_BYTES = 2**22
"""A longer metrics.jsonl, of some 15,000 lines, is read in part for a page that asks again as it grows."""


class RunDesk:
    """The runs below a folder and the processes that train them, asked by one request at a time."""

    def __init__(self, folder: StrPath) -> None:
        self.index, self.processes, self.studies = RunIndex(folder), RunProcesses(folder), Studies(folder)
        self.reading = asyncio.Lock()


def _desk(request: Request) -> RunDesk:
    return request.app.state.desk


async def _runs(request: Request) -> Response:
    desk = _desk(request)
    async with desk.reading:
        runs = await asyncio.to_thread(desk.index.runs)
    answer = {"folder": str(desk.index.folder), "runs": runs, "axes": axes(), "waiting": desk.index.n_waiting}
    return as_json(answer | {"allow_actions": request.app.state.allow_actions, "started": desk.processes.states()})


class CurvesRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A curve of some runs, and the part of an axis that is shown; see `RunIndex.curves`."""

    runs: list[str]
    curve: str
    axis: Literal["steps", "tokens", "flops", "seconds", "dollars"] = "tokens"
    points: Annotated[int, msgspec.Meta(ge=2, le=MOST_POINTS)] = 600
    begin: float | None = None
    end: float | None = None
    means: bool = False


async def _curves(request: Request) -> Response:
    asked, desk = await body_of(request, CurvesRequest, MOST_NAME_BYTES), _desk(request)
    begin = -math.inf if asked.begin is None else asked.begin
    end = math.inf if asked.end is None else asked.end
    part = functools.partial(desk.index.curves, begin=begin, end=end, means=asked.means)
    async with desk.reading:
        content = await asyncio.to_thread(part, asked.runs, asked.curve, asked.axis, asked.points)
    return Response(content, media_type="application/octet-stream")


class RunsRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Some runs by their names."""

    runs: list[str]


async def _differences(request: Request) -> Response:
    asked, desk = await body_of(request, RunsRequest, MOST_NAME_BYTES), _desk(request)
    async with desk.reading:
        return as_json(await asyncio.to_thread(desk.index.differences, asked.runs))


async def _report(request: Request) -> Response:
    """The report of a run as it is now, with its scripts inlined, each allowed by its hash."""
    desk = _desk(request)
    async with desk.reading:
        path = desk.index.path_of(request.query_params.get("run", ""))
        page = await asyncio.to_thread(lambda: render_report(read_run_record(path), training=is_being_trained(path)))
    headers = {"content-security-policy": "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"}
    return Response(page, media_type="text/html", headers=headers)


async def _one_run(request: Request) -> Response:
    """A run in words: its state, what stands out, key figures, samples, and answers to held-out tasks."""
    desk, name = _desk(request), request.query_params.get("run", "")
    async with desk.reading:
        return as_json(await asyncio.to_thread(in_words, desk.index, name))


def in_words(index: RunIndex, name: str) -> dict[str, Any]:
    """One run in words. For a long run only a part of the logged lines is read, and the text says so."""
    path = index.path_of(name)
    training = is_being_trained(path)
    file = path / METRICS_FILE
    is_long = file.is_file() and file.stat().st_size > MOST_METRICS_BYTES
    run = read_run_record(path, telling_lines(file) if is_long else None)
    warnings = warnings_of(run, training=training)
    if run.left_out:
        n_read = len(run.metrics)
        warnings.append(f"Of {n_read + run.left_out:,} logged steps {n_read:,} are read here; its report reads all.")
    return {
        "name": name,
        "training": training is True,
        "status": status_of(run, training=training),
        "warnings": warnings,
        "verdict": run.verdict,
        "figures": [each._asdict() for each in key_figures(run)],
        "recipe": run.recipe,
        "samples": (run.samples or "")[:MOST_SAMPLE_CHARACTERS],
        "answers": None if run.answers is None else msgspec.to_builtins(run.answers),
    }


async def _log(request: Request) -> Response:
    desk, name = _desk(request), request.query_params.get("run", "")
    states = desk.processes.states()
    if name not in states:
        desk.index.path_of(name)
    return as_json({"log": await asyncio.to_thread(desk.processes.log, name), "state": states.get(name)})


async def _recipes(request: Request) -> Response:
    desk = _desk(request)
    async with desk.reading:
        await asyncio.to_thread(desk.index.runs)
    return as_json(recipes_below(desk.index.folder, desk.index.known))


async def _recipe_file(request: Request) -> Response:
    """The text of a recipe that the list names."""
    desk, name = _desk(request), request.query_params.get("name", "")
    blank = blank_recipe(name)
    if blank is not None:
        return as_json({"recipe": blank})
    known = await asyncio.to_thread(recipes_below, desk.index.folder, desk.index.known)
    if name not in known:
        raise NapkinError(f"there is no recipe '{name}' below '{desk.index.folder}': the list of recipes has the names")
    content = await asyncio.to_thread(read_bytes, desk.index.folder / name)
    return as_json({"recipe": content[:MOST_RECIPE_BYTES].decode("utf-8", errors="replace")})


async def _studies(request: Request) -> Response:
    """Names of sweeps and laws, and the evaluations, below the folder."""
    desk = _desk(request)
    async with desk.reading:
        return as_json(await asyncio.to_thread(desk.studies.found))


async def _sweep(request: Request) -> Response:
    desk, name = _desk(request), request.query_params.get("name", "")

    def read() -> dict[str, Any]:
        runs = desk.index.runs()
        return desk.studies.sweep(name, {desk.index.known[each["name"]]: each for each in runs})

    async with desk.reading:
        return as_json(await asyncio.to_thread(read))


async def _law(request: Request) -> Response:
    desk, name = _desk(request), request.query_params.get("name", "")
    async with desk.reading:
        return as_json(await asyncio.to_thread(desk.studies.law, name))


class StartRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A recipe in TOML, and the name of the run that it is trained to."""

    name: str
    recipe: str


class NameRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A run by its name."""

    name: str


async def _start(request: Request) -> Response:
    refuse_unless_allowed(request)
    asked = await body_of(request, StartRequest, MOST_RECIPE_BYTES)
    await asyncio.to_thread(_desk(request).processes.start, asked.name, asked.recipe)
    return as_json({"name": asked.name})


async def _stop(request: Request) -> Response:
    refuse_unless_allowed(request)
    name, desk = (await body_of(request, NameRequest)).name, _desk(request)
    await asyncio.to_thread(desk.processes.stop, name, desk.index.path_of(name))
    return as_json({"name": name})


async def _resume(request: Request) -> Response:
    refuse_unless_allowed(request)
    name, desk = (await body_of(request, NameRequest)).name, _desk(request)
    await asyncio.to_thread(desk.processes.resume, name, desk.index.path_of(name))
    return as_json({"name": name})


RUN_ROUTES = [
    Route("/api/runs", _runs),
    Route("/api/runs/curves", _curves, methods=["POST"]),
    Route("/api/runs/differences", _differences, methods=["POST"]),
    Route("/api/runs/one", _one_run),
    Route("/api/runs/log", _log),
    Route("/api/runs/recipes", _recipes),
    Route("/api/runs/recipe", _recipe_file),
    Route("/api/runs/start", _start, methods=["POST"]),
    Route("/api/runs/stop", _stop, methods=["POST"]),
    Route("/api/runs/resume", _resume, methods=["POST"]),
    Route("/runs/report", _report),
    Route("/api/studies", _studies),
    Route("/api/studies/sweep", _sweep),
    Route("/api/studies/law", _law),
]
