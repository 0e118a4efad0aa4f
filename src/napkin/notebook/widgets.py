"""The widgets: a page, and the functions that answer its requests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import anywidget
import msgspec
import traitlets

from napkin.errors import NapkinError, first_line, suggestion
from napkin.files import StrPath
from napkin.hardware.cluster import find_cluster
from napkin.notebook.pages import document
from napkin.report.page import render_report
from napkin.runs.run_folder import is_being_trained
from napkin.runs.run_record import read_run_record
from napkin.studio.learn.ideas import IDEAS
from napkin.studio.page_files import with_top
from napkin.studio.plans import PlanRequest, plan_by_count, planner_catalogue, recipe_text

Answer = Callable[[bytes], Any]
"""A function that takes the body of a request and returns its answer, which becomes JSON unless it is a text."""


class PageWidget(anywidget.AnyWidget):
    """A page in a frame, and the functions that answer what it asks, by path."""

    _esm = Path(__file__).parent / "frame.js"
    title = traitlets.Unicode().tag(sync=True)
    page = traitlets.Unicode().tag(sync=True)
    height = traitlets.Int(800).tag(sync=True)

    def __init__(self, page: str, *, title: str, answers: dict[str, Answer] | None = None, height: int = 800) -> None:
        super().__init__(page=page, title=title, height=height)
        self._answers = answers or {}
        self.on_msg(lambda widget, content, buffers: self._told(content))

    def _told(self, question: dict[str, Any]) -> None:
        """Answer a question of the page: its path and body."""
        status, content = answered(self._answers, str(question.get("path")), question.get("body"))
        self.send({"number": question.get("number"), "status": status, "content": content})


def answered(answers: dict[str, Answer], path: str, body: str | None) -> tuple[int, Any]:
    """The status and the answer, as the studio's server would give them."""
    if path not in answers:
        return 404, {"error": f"there is no '{path}' here"}
    try:
        content = answers[path]((body or "{}").encode())
    except NapkinError as error:
        return 422, {"error": first_line(error)}
    except (msgspec.DecodeError, UnicodeError) as error:
        return 400, {"error": first_line(error)}
    # Numbers that are not finite become null, as in the studio's answers.
    return 200, content if isinstance(content, str) else msgspec.json.decode(msgspec.json.encode(content))


class LearnChart(PageWidget):
    """A page of an idea: `LearnChart("pipelines", ranks=8)`; the names are those of the studio's `/learn/NAME`.

    Further arguments are what its controls begin with. Raises NapkinError for an idea that there is not.
    """

    def __init__(self, idea: str, *, height: int = 1000, **controls: Any) -> None:
        if idea not in IDEAS:
            raise NapkinError(f"there is no page of '{idea}': {suggestion(idea, IDEAS)}")
        chosen = IDEAS[idea]
        super().__init__(
            document(chosen.page(with_top("learn.html", "")), urlencode(controls)),
            title=chosen.title,
            answers={
                f"/api/learn/{idea}": lambda body: chosen.answer(msgspec.json.decode(body, type=chosen.request)),
                "/api/planner/catalogue": lambda body: planner_catalogue(),
            },
            height=height,
        )


class PlanChart(PageWidget):
    """The planner, beginning with a published model on devices: `PlanChart("llama-3-8b", on="64xH100")`.

    Further arguments are what its controls begin with, as in `batch_size=256, recompute="full"`; the names are those of
    its link in the studio. Raises NapkinError for devices that the catalogue does not have.
    """

    def __init__(self, preset: str, *, on: str, height: int = 1200, **controls: Any) -> None:
        cluster = find_cluster(on)
        state = {"preset": preset, "device": cluster.device.name, "n": cluster.n_devices, **controls}
        super().__init__(
            document(with_top("planner.html", ""), urlencode(state)),
            title=f"Plan of {preset} on {on}",
            answers={
                "/api/planner/catalogue": lambda body: planner_catalogue(),
                "/api/planner/plan": lambda body: plan_by_count(_plan_request(body), lambda doing: None),
                "/api/planner/recipe": lambda body: recipe_text(_plan_request(body)),
            },
            height=height,
        )


def _plan_request(body: bytes) -> PlanRequest:
    return msgspec.json.decode(body, type=PlanRequest)


class RunChart(PageWidget):
    """The report of a run's folder, as it is now. Raises NapkinError for a folder that is not a run."""

    def __init__(self, run: StrPath, *, height: int = 900) -> None:
        folder = Path(run)
        page = render_report(read_run_record(folder), training=is_being_trained(folder))
        super().__init__(page, title=f"Report of {folder.name}", height=height)
