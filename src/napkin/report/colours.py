"""The colours of the pages."""

# Okabe & Ito's palette, safe for colour-blind readers; style.html has brighter ones for a dark background.
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

_SHADES = {
    "parameters": "blue",
    "gradients": "orange",
    "optimizer state": "green",
    "weight copies": "sky",
    "activations": "vermilion",
    "inputs": "grey",
    "temporaries": "purple",
    "data": "orange",
    "forward": "sky",
    "backward": "blue",
    "recompute": "purple",
    "optimizer": "green",
    "metering": "yellow",
    "evaluation": "vermilion",
    "checkpoints": "purple",
    "other": "grey",
}


def shade(name: str) -> str:
    """The colour (one of `COLOURS`) of a category of memory or of time; grey if it is unknown."""
    return _SHADES.get(name, "grey")
