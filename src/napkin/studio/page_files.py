"""The files of the studio's pages: their HTML, scripts and styles, and the links that stand at the top of each page."""

from importlib.resources import files

PAGE_FILES = files("napkin.studio") / "pages"
REPORT_FILES = files("napkin.report")
_ANSWER_FILES = files("napkin.serving") / "page"
PAGES = {
    "/": ("home.html", "Studio"),
    "/planner": ("planner.html", "Planner"),
    "/services": ("services.html", "Services"),
    "/runs": ("runs.html", "Runs"),
    "/run": ("run.html", ""),
    "/scaling": ("scaling.html", "Sweeps and laws"),
    "/evaluations": ("evaluations.html", "Evaluations"),
    "/data": ("data.html", "Data"),
    "/tokenizer": ("tokenizer.html", "Tokenizers"),
    "/chat": ("chat.html", "Chat"),
    "/learn": ("learn-index.html", "Learn"),
}
"""The file of each page, and what the links at the top of all pages call it; those without a name are reached from
others."""
ASSETS = {
    "uplot.js": REPORT_FILES / "vendor" / "uPlot-1.6.32.iife.min.js",
    "uplot.css": REPORT_FILES / "vendor" / "uPlot-1.6.32.min.css",
    "format.js": REPORT_FILES / "format.js",
    "tokens.js": _ANSWER_FILES / "tokens.js",
    "tokens.css": _ANSWER_FILES / "tokens.css",
    **{each.name: each for each in PAGE_FILES.iterdir() if each.name.endswith((".js", ".css"))},
}
"""Files that pages load, by name."""
_PLACE_OF_LINKS = "<!-- pages -->"


def page(path: str) -> str:
    """The HTML of a page of the studio, with the links to all pages."""
    return with_top(PAGES[path][0], top_of(path))


def top_of(path: str) -> str:
    """The links to all pages, as they stand at the top of one, or of one below it."""
    here = ' aria-current="page"'
    links = (
        f'<a href="{each}"{here if each == path else ""}>{title}</a>' for each, (_, title) in PAGES.items() if title
    )
    return f'<nav class="top" aria-label="Pages"><strong>napkin</strong>{"".join(links)}</nav>'


def with_top(name: str, top: str) -> str:
    """The HTML of a file, with the common top of all pages."""
    return (PAGE_FILES / name).read_text(encoding="utf-8").replace(_PLACE_OF_LINKS, top, 1)
