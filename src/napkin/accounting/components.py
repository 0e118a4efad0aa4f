"""What a call is for: the part of a model that it belongs to, by the module that made it and by what it multiplies.

Modules are told apart by their names and classes, from the innermost to the outermost. The names are those of napkin's
models, of torch's layers and of the Hugging Face library's.
"""

import re
from collections.abc import Sequence
from typing import Literal

Component = Literal[
    "embedding",
    "attention projections",
    "attention scores",
    "feed-forward",
    "norms",
    "head",
    "loss",
    "optimizer",
    "other",
]
"""Attention scores are the products of queries, keys and values, and all between them: rotation, mask, softmax.
Other are residual sums, dropout and modules whose names say nothing."""

Word = tuple[str, str]
"""A module's name in its parent, and its class."""

_PARTS: tuple[tuple[Component, re.Pattern[str]], ...] = (
    ("norms", re.compile(r"norm|^ln(_|\d|$)|rms")),
    ("loss", re.compile(r"loss|criterion|entropy")),
    ("attention scores", re.compile(r"att(e)?n")),
    ("feed-forward", re.compile(r"mlp|ffn|feed_?forward|expert|moe|swiglu|router|intermediate")),
    ("head", re.compile(r"head$|^unembed|^classifier$|^score$")),
    ("embedding", re.compile(r"emb|^wte$|^wpe$|^(tokens|positions)$")),
)
_PROJECTIONS: tuple[tuple[Component, re.Pattern[str]], ...] = (
    (
        "attention projections",
        re.compile(r"^(qkv|query|key|value|out|output|[qkvo])(_?proj)?$|^query_key_value$"),
    ),
    ("feed-forward", re.compile(r"^(up|down|gate|fc\d?|linear\d|w[123]|gate_up)(_?proj)?$")),
)


def component_of(words: Sequence[Word], *, contraction: bool, of_activations: bool, after_head: bool) -> Component:
    """The component of a call of the forward pass.

    Args:
        words: of the modules that it runs in, the innermost first; none outside of all modules.
        contraction: whether it is one.
        of_activations: whether it multiplies activations alone.
        after_head: whether the head has run.
    """
    part = _part_of(words)
    if of_activations:
        return "feed-forward" if part == "feed-forward" else "attention scores"
    if part == "attention scores":
        return "attention projections" if contraction or "linear" in words[0][1].lower() else part
    if part != "other":
        return part
    if after_head:
        # A fused loss multiplies by the head's matrix again for its gradient.
        return "head" if contraction else "loss"
    # A model's own product with a parameter, outside of its layers, is the one with its output matrix.
    return "head" if contraction and len(words) <= 1 else "other"


def _part_of(words: Sequence[Word]) -> Component:
    for name, kind in words:
        for part, pattern in _PROJECTIONS if "linear" in kind.lower() else ():
            if pattern.search(name.lower()):
                return part
        for part, pattern in _PARTS:
            if pattern.search(name.lower()) or (name and pattern.search(kind.lower())):
                return part
    return "other"
