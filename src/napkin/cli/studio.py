"""`napkin studio` serves pages to plan, watch and compare runs, for the browser of this machine."""

import importlib.util
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from napkin.cli.common.options import Switch, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import say
from napkin.errors import NapkinError


@dataclass(frozen=True)
class StudioOptions:
    """Serve pages in which runs are planned, watched and compared, for the browser of this machine: no account, nothing
    is sent elsewhere. The address that is printed holds a token, without which nobody gets an answer."""

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER]")] = "."
    """Folder whose runs are shown, with those in folders below it."""
    port: int = 8050
    """Port to listen on, at 127.0.0.1; 0 takes a free one."""
    allow_actions: Switch = False
    """Let pages write and start things, such as votes between answers; without it they only show."""
    planner_file: str | None = None
    """HTML file to write instead of serving: the planner alone, by rule, with the counts of published models on some
    devices; it asks for nothing and can be hosted anywhere."""
    browser: Switch = False
    """Also open the address in the browser."""


@command("studio", StudioOptions)
def main(options: StudioOptions) -> None:
    if options.planner_file is not None:
        with progress_line("making the planner") as line:
            from napkin.studio.planner_file import write_planner_file

            counted = write_planner_file(options.planner_file, progress=line.retitle)
        say(f"{options.planner_file}: the planner by rule, with {counted} plans counted")
        return
    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise NapkinError(f"napkin studio needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    if not 0 <= options.port < 2**16:
        raise NapkinError(f"--port is {options.port}: use 0 to {2**16 - 1}")
    if not Path(options.folder).is_dir():
        raise NapkinError(f"'{options.folder}' is not a folder: name one that has runs in it, or leave it out")
    from napkin.studio.run import serve_studio

    def started(address: str) -> None:
        say(f"studio: {address} (Ctrl-C ends it)")
        if options.browser:
            webbrowser.open(address)

    serve_studio(options.folder, port=options.port, on_start=started, allow_actions=options.allow_actions)
