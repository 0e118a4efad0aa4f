"""How the accountant's objects print: as a few lines of text, and in a notebook as a small table."""

from collections.abc import Callable, Iterable, Iterator
from html import escape

Line = tuple[str, str]
"""(name, figures)."""


class Summary:
    """An object whose `repr` is a few lines, the first of which is its heading."""

    def summary(self) -> Iterator[Line]:
        """Yield the heading and its figures, then a line for each quantity."""
        raise NotImplementedError

    def __repr__(self) -> str:
        (title, heading), *lines = self.summary()
        width = max((len(name) for name, _ in lines), default=0)
        return "\n".join([f"{title}: {heading}", *(f"  {name:<{width}}  {figures}" for name, figures in lines)])

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        (title, heading), *lines = self.summary()
        return as_html(lines, caption=f"{title}: {heading}")


def as_html(
    rows: Iterable[Iterable[str]], *, header: Iterable[str] = (), caption: str = "", notes: Iterable[str] = ()
) -> str:
    """A table of cells; the first cell of each row is its heading. All text is escaped."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row" style="text-align: left">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return (
        "<table>"
        + (f'<caption style="text-align: left">{escape(caption)}</caption>' if caption else "")
        + (f"<thead><tr>{head}</tr></thead>" if head else "")
        + f"<tbody>{body}</tbody></table>"
        + "".join(f"<div><small>{escape(note)}</small></div>" for note in notes)
    )


def largest(parts: Iterable[tuple[str, float]], most: int = 4) -> list[tuple[str, float]]:
    """The `most` largest parts that are not zero, and all others together.

    >>> largest([("a", 1), ("b", 5), ("c", 0), ("d", 2)], most=2)
    [('b', 5), ('d', 2), ('others', 1)]
    """
    ordered = sorted(((name, value) for name, value in parts if value), key=lambda part: -part[1])
    rest = sum(value for _, value in ordered[most:])
    return [*ordered[:most], *([("others", rest)] if rest else [])]


def with_parts(whole: float, parts: Iterable[tuple[str, float]], show: Callable[[float], str]) -> str:
    """A figure and what it consists of.

    >>> with_parts(3, [("a", 1), ("b", 2)], str)
    '3: a 1; b 2'
    """
    text = "; ".join(f"{name} {show(value)}" for name, value in parts)
    return f"{show(whole)}: {text}" if text else show(whole)
