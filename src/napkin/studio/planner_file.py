"""The planner as one file that anybody can host or open from a disk: its rule, the catalogue, and some counts."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from napkin.errors import NapkinError
from napkin.files import StrPath, atomic_write_text
from napkin.studio.page_files import ASSETS, with_top
from napkin.studio.plans import first_request, plan_by_count, planner_catalogue, rules_script

COUNTED_ON = ("8xA100-SXM-80GB", "8xH100-SXM-80GB", "64xH100-SXM-80GB", "8xH200-SXM-141GB", "64xB200-SXM-180GB")
"""Devices on which the published models are counted for the file: with the models, 200 plans and more."""
_SHOWN = "bytes_by_use seconds_by_kind peak_bytes fits seconds_per_step mfu factor".split()
"""Figures that the page cannot compute from others, in the order of a row."""

_SOURCED = ("models", "devices")
_SCRIPTS = ("studio.js", "controls.js", "planner.js")
"""The scripts of the page, each after those that it imports."""


def write_planner_file(
    path: StrPath,
    *,
    counted_on: Sequence[str] = COUNTED_ON,
    models: Sequence[str] | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> int:
    """Write the file and return how many plans are counted in it: those of published models, None is all, on devices.

    A plan is a row of what `_SHOWN` names, so that 200 of them take 30 kB.

    Raises NapkinError where a file is there already.
    """
    catalogue = planner_catalogue()
    counts: dict[str, Any] = {}
    names: list[str] = []
    for name in catalogue["models"] if models is None else models:
        for on in counted_on:
            progress(f"counting {name} on {on}")
            try:
                plan = plan_by_count(first_request(name, on), lambda doing: None)
            except NapkinError:
                # A batch that does not divide, or a format that the device lacks: the page says that it is by rule.
                continue
            counts[f"{name} {on}"] = [_packed(plan[field], names) for field in _SHOWN]
    # Sources are a third of the file, and stand in the catalogue that `napkin hardware` and `napkin plan` show.
    shown = {kind: {name: _without_source(each) for name, each in catalogue[kind].items()} for kind in _SOURCED}
    known = {"counts": counts, "shown": _SHOWN, "names": names}
    atomic_write_text(path, _page({**catalogue, **shown, **known}), overwrite=False)
    return len(counts)


def _without_source(each: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in each.items() if name != "source"}


def _packed(value: Any, names: list[str]) -> Any:
    """Figures by name as places in `names` and figures in turns. Six digits are more than the page shows."""
    if isinstance(value, dict):
        names.extend(name for name in value if name not in names)
        return [part for name, each in value.items() if each for part in (names.index(name), _packed(each, names))]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _page(catalogue: dict[str, Any]) -> str:
    """The planner's page with all that it asks for in it; its policy allows these scripts and no address."""
    style, forms = (ASSETS[name].read_text(encoding="utf-8") for name in ("studio.css", "format.js"))
    parts = [rules_script(), *(ASSETS[name].read_text(encoding="utf-8") for name in _SCRIPTS)]
    # The parts become one module, which needs none of their exports and imports.
    script = "\n".join(parts)
    script = re.sub(r"^import .*\n|^export \{.*\n", "", script, flags=re.MULTILINE)
    script = re.sub(r"^export ", "", script, flags=re.MULTILINE)
    content = json.dumps(catalogue, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    allowed = " ".join(map(_hash, (forms, script)))
    policy = f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; img-src data:; base-uri 'none'"
    page = with_top("planner.html", '<p class="top"><strong>napkin</strong></p>')
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
        f'<script id="catalogue" type="application/json">{content}</script>\n<script>{forms}</script>\n</head>'
    )
    page = re.sub(r'^<(link rel="stylesheet"|script).*\n', "", page, flags=re.MULTILINE)
    page = page.replace("</head>", head, 1)
    return page.replace("</body>", f'<script type="module">{script}</script>\n</body>', 1)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
