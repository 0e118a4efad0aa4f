"""The files of units that a recipe of tuning names: encoded once, and what is left out of them told every time."""

from napkin.alignment.method import TuningContext
from napkin.alignment.unit_file import UnitFile, UnitKind
from napkin.alignment.unit_writer import unit_file_of
from napkin.errors import NapkinError
from napkin.files import StrPath


def opened_units(context: TuningContext, kind: UnitKind, *, max_length: int) -> tuple[UnitFile, UnitFile | None]:
    """Those of data.train, and of data.validation if it names a file; sequences have at most `max_length` tokens.

    Raises NapkinError where they cannot be read or hold nothing to learn from.
    """
    data = context.recipe.data
    if not isinstance(data.train, str):
        raise NapkinError("data.train names several files, and tuning reads one: join them")
    if not data.train:
        raise NapkinError(f"no {kind} to learn from are named: use --data.train with a file of JSON lines")
    train = _opened(context, data.train, kind, max_length)
    return train, _opened(context, data.validation, kind, max_length) if data.validation else None


def _opened(context: TuningContext, path: StrPath, kind: UnitKind, max_length: int) -> UnitFile:
    units = unit_file_of(
        path,
        kind,
        context.encoder,
        max_length=max_length,
        progress=lambda n: None if n % 1000 else context.progress(f"encoding {n:,} {kind}"),
    )
    left_out = units.left_out
    if left_out.n and context.ranks.is_rank_zero:
        n = left_out.n + len(units)
        context.on_message(f"'{path}': {left_out.n:,} of {n:,} {kind} are left out: {left_out.describe()}")
    return units
