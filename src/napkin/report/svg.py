"""matplotlib's drawings as inline SVG: text stays text, colours come from the page, equal data give equal bytes."""

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe & Ito's palette, safe for colour-blind readers. The page may override each colour by a CSS variable, brighter on
# a dark background; the value here is the fallback.
COLOURS = {
    "blue": "#0072b2",
    "orange": "#e69f00",
    "green": "#009e73",
    "vermilion": "#d55e00",
    "sky": "#56b4e9",
    "purple": "#cc79a7",
    "yellow": "#f0e442",
    "grey": "#8c8c8c",
}
# Placeholders that matplotlib can parse, replaced by the page's colours afterwards.
INK, RULE, PAPER = "#010101", "#020202", "#030303"
_VARIABLES = {
    **{value: f"var(--{name},{value})" for name, value in COLOURS.items()},
    INK: "currentColor",
    RULE: "var(--rule,#8c8c8c66)",
    PAPER: "var(--paper,#fff)",
}
FONT_SIZE = 12


def draw_svg(name: str, width: int, height: int, paint: Callable[["Figure"], None]) -> str:
    """Let `paint` draw on an empty figure of width × height pixels, and return it as an <svg> element.

    `name` makes the ids of the drawing unique on a page.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # The defaults first: the user's matplotlibrc must not change a report.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": f"{name}-{width}",
                "font.size": FONT_SIZE,
                "text.color": INK,
                "axes.edgecolor": RULE,
                "axes.labelcolor": INK,
                "xtick.color": RULE,
                "ytick.color": RULE,
                "xtick.labelcolor": INK,
                "ytick.labelcolor": INK,
                "grid.color": RULE,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "lines.solid_joinstyle": "round",
            }
        )
        # At 72 dpi a point, matplotlib's unit of length, is a pixel.
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        paint(figure)
        drawing = io.StringIO()
        figure.savefig(drawing, format="svg", transparent=True, metadata={"Date": None})
    return _inline(drawing.getvalue(), width, height)


def _inline(document: str, width: int, height: int) -> str:
    body = document[document.index("<svg") : document.rindex("</svg>")]
    body = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)
    body = body[body.index(">") + 1 :]
    # matplotlib draws the background of figure and axes even if it is transparent.
    body = re.sub(r'<path [^>]*style="fill: none"/>', "", body)
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', body))
    body = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", body)
    body = re.sub(r"<[^>]*>", _tidy_tag, body)
    body = re.sub(r"\s*\n\s*", "\n", body)
    while body != (body := re.sub(r"<(g|defs)>\s*</\1>\s*", "", body)):
        pass
    return (
        f'<svg viewBox="0 0 {width} {height}" font-size="{FONT_SIZE}" stroke-linejoin="round" aria-hidden="true">'
        f"{body.strip()}</svg>"
    )


def _tidy_tag(tag: re.Match[str]) -> str:
    # More than two decimals of a pixel are invisible, and most of the bytes.
    text = re.sub(r"(\.\d\d)\d+", r"\1", tag[0])
    # Text is set in the page's font; only matplotlib's weight is kept.
    text = re.sub(r"font(?:-family|-size)?: (bold |700 )?[^;\"]*;?\s*", _keep_weight, text)
    text = re.sub(r' transform="rotate\(-?0 [^"]*"', "", text.replace("xlink:href", "href"))
    return re.sub("#[0-9a-f]{6}", lambda colour: _VARIABLES.get(colour[0], colour[0]), text)


def _keep_weight(font: re.Match[str]) -> str:
    return "font-weight: bold; " if font[1] else ""
