"""Shapes on the command line: "tokens=4096,d_model=512" names some of a call's dimensions, the others keep theirs."""

from collections.abc import Iterable, Mapping, Sequence

from napkin.errors import NapkinError, suggestion
from napkin.units import parse_bytes, parse_count

Shape = Mapping[str, int]

LARGEST_DIMENSION = 2**40


def read_shapes(
    texts: Sequence[str], dimensions: Iterable[str], named: Mapping[str, Mapping[str, Shape]] | None = None
) -> list[dict[str, int]]:
    """The dimensions that each text names, as numbers; counts may have prefixes, as in 64k.

    `named` has, for a dimension whose values are names, the dimensions that each name stands for:

    >>> read_shapes(["size=small,tokens=4k"], ["tokens", "d_model"], {"size": {"small": {"d_model": 768}}})
    [{'d_model': 768, 'tokens': 4000}]

    Raises NapkinError for a text that is none of these.
    """
    known, names = list(dimensions), named or {}
    return [_read(text, known, names) for text in texts]


def shape_text(shape: Mapping[str, int]) -> str:
    """A shape as it is written on the command line.

    >>> shape_text({"tokens": 4096, "d_model": 512})
    'tokens=4096,d_model=512'
    """
    return ",".join(f"{name}={size}" for name, size in shape.items())


def _read(text: str, known: list[str], named: Mapping[str, Mapping[str, Shape]]) -> dict[str, int]:
    shape: dict[str, int] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        name = name.replace("-", "_")
        if not equals:
            raise NapkinError(f"--shapes '{text}' is not a shape: write dimensions as in {known[0]}=64,{known[-1]}=128")
        if name in named:
            if value not in named[name]:
                raise NapkinError(f"--shapes {name}='{value}' is not known: {suggestion(value, named[name])}")
            shape |= named[name][value]
            continue
        if name not in known:
            raise NapkinError(f"--shapes has no dimension '{name}': {suggestion(name, [*known, *named])}")
        try:
            shape[name] = parse_bytes(value) if name == "bytes" else parse_count(value)
        except NapkinError as error:
            raise NapkinError(f"--shapes {name}: {error}") from None
        if not 1 <= shape[name] <= LARGEST_DIMENSION:
            raise NapkinError(f"--shapes {name}={value} is out of range: use 1 to {LARGEST_DIMENSION}")
    return shape
