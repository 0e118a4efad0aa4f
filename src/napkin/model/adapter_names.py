"""Matrices that can have an adapter, by the name that a recipe gives them. Does not import torch."""

from collections.abc import Sequence

from napkin.errors import NapkinError, suggestion

GROUPS = {
    "attention": ("attention.query", "attention.key", "attention.value", "attention.output"),
    "mlp": ("mlp.gate", "mlp.up", "mlp.down"),
}
MATRICES = (*GROUPS["attention"], *GROUPS["mlp"], "head")


def matrices_of(name: str) -> tuple[str, ...]:
    """The matrices of a group, or the one of that name."""
    return GROUPS.get(name, (name,))


def refuse_unknown(modules: Sequence[str]) -> None:
    """Raise NapkinError for a name that is neither of a group nor of a matrix."""
    known = [*GROUPS, *MATRICES]
    for name in modules:
        if name not in known:
            raise NapkinError(f"adapter.modules names '{name}', which is no matrix: {suggestion(name, known)}")
