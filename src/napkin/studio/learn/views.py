"""Strides and views: which places of a storage a tensor reads, and when it must be copied."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from napkin.errors import NapkinError
from napkin.studio.learn.idea import Idea

if TYPE_CHECKING:
    from torch import Tensor

_STEPS: dict[str, "Callable[[Tensor], Tensor]"] = {
    "x.T": lambda x: x.mT if x.dim() > 1 else x.T,
    "x[1:]": lambda x: x[1:],
    "x[:, 1:]": lambda x: x[:, 1:],
    "x[::2]": lambda x: x[::2],
    "x[:, ::2]": lambda x: x[:, ::2],
    "x[0]": lambda x: x[0],
    "x[:, 0]": lambda x: x[:, 0],
    "x.expand(3, ...)": lambda x: x.expand(3, *x.shape),
    "x.unfold(-1, 2, 1)": lambda x: x.unfold(-1, 2, 1),
    "x.view(-1)": lambda x: x.view(-1),
    "x.reshape(-1)": lambda x: x.reshape(-1),
    "x.contiguous()": lambda x: x.contiguous(),
}
MOST_STEPS = 6
MOST_ELEMENTS = 512


class ViewRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A tensor of consecutive numbers, and the operations on it."""

    rows: Annotated[int, msgspec.Meta(ge=1, le=8)] = 3
    columns: Annotated[int, msgspec.Meta(ge=1, le=8)] = 4
    steps: Annotated[str, msgspec.Meta(max_length=200)] = "x.T"
    """The operations, separated by semicolons."""


def view_answer(asked: ViewRequest) -> dict[str, Any]:
    """Each tensor on the way with what `napkin.inspect` says of it, the places of the storage that the last one reads,
    and what cannot be done.

    Raises NapkinError for a step that the page does not have, and for more than `MOST_STEPS`.
    """
    import torch

    from napkin.tensors import inspect, view_obstacle

    tensors = {"x": torch.arange(float(asked.rows * asked.columns)).view(asked.rows, asked.columns)}
    refused = None
    for number, step in enumerate(_steps(asked.steps), 1):
        last = list(tensors.values())[-1]
        try:
            made = _STEPS[step](last)
        except (RuntimeError, IndexError) as error:
            why = view_obstacle(last, (-1,)) if step == "x.view(-1)" else None
            refused = f"{step} fails: {why or str(error).splitlines()[0]}"
            break
        if made.numel() > MOST_ELEMENTS:
            refused = f"{step} has {made.numel()} elements: the page draws {MOST_ELEMENTS}"
            break
        tensors[f"{number}. {step}"] = made
    if len(tensors) == 1:
        first = tensors["x"]
        reports, storages = {"x": inspect(first)}, (("x",),)
    else:
        sharing = inspect(**tensors)
        reports, storages = sharing.tensors, sharing.storages
    last = list(tensors.values())[-1]
    size = last.untyped_storage().nbytes() // last.element_size()
    places = torch.arange(size).as_strided(last.shape, last.stride(), last.storage_offset())
    return {
        "tensors": [
            {
                "name": name,
                "shape": report.shape,
                "strides": report.strides,
                "offset": report.offset,
                "contiguous": report.contiguous,
                "bytes": report.bytes,
                "storage_bytes": report.storage_bytes,
                "storage": next(number for number, names in enumerate(storages, 1) if name in names),
                "obstacle": report.view_obstacle,
            }
            for name, report in reports.items()
        ],
        "shape": list(last.shape),
        "places": places.flatten().tolist(),
        "values": last.flatten().tolist(),
        "storage": last.as_strided((size,), (1,), 0).tolist(),
        "refused": refused,
    }


def _steps(text: str) -> list[str]:
    steps = [each.strip() for each in text.split(";") if each.strip()]
    for step in steps:
        if step not in _STEPS:
            raise NapkinError(f"'{step[:40]}' is not a step: use {', '.join(_STEPS)}")
    if len(steps) > MOST_STEPS:
        raise NapkinError(f"there are {len(steps)} steps: use up to {MOST_STEPS}")
    return steps


VIEWS = Idea(
    name="strides",
    title="Strides and views",
    summary="A tensor, the operations on it, which places of its storage each view reads, and when a copy is needed.",
    text=(
        "A tensor is a row of numbers in memory, its storage, and a rule for reading it: where to begin, and how far "
        "to step for each index. Transposing, slicing and expanding change the rule alone; they cost nothing and "
        "share the memory, so writing to a view writes to the tensor.",
        "A reshape needs no copy if one step of an outer dimension is as far as all steps of the next inner one. "
        "After a transpose it is not: view fails, and reshape copies. Kernels read neighbours fastest, so a layout "
        "that is not contiguous can cost time as well.",
    ),
    formula="place of x[i, j] = offset + i · stride[0] + j · stride[1]\n"
    "dimensions i and i + 1 merge if stride[i] = stride[i + 1] · size[i + 1]",
    command='python -c "import napkin, torch; x = torch.zeros(3, 4); print(napkin.inspect(x=x, y=x.T))"',
    files=("tensors.py",),
    request=ViewRequest,
    answer=view_answer,
)
