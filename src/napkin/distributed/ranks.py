"""The processes that train one run together: who this one is, and how they come to agree.

torchrun starts them and says in the environment who is who. A process alone is the first of one: it agrees with itself,
and nothing of torch.distributed is used.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from signal import Signals
from typing import TYPE_CHECKING, Any

from napkin.errors import NapkinError
from napkin.training.signals import Interruption

if TYPE_CHECKING:
    from torch import Tensor

    from napkin.recipe.recipe import TrainingConfig


@dataclass(frozen=True)
class Place:
    """This process among those of its job."""

    rank: int = 0
    """From 0; the first one writes the run's files and speaks for all."""
    size: int = 1
    local_rank: int = 0
    """From 0 on this machine: the number of its GPU."""
    local_size: int = 1
    attempt: int = 0
    """How often torchrun has begun the job again after a process was lost."""


class Ranks:
    """Processes that train one run together, each with rows of its own of every batch; here: one alone.

    All of them call the same methods in the same order. Values travel between them as JSON.
    """

    def __init__(self, place: Place) -> None:
        self.place = place

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.place.size

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run's files and speaks for all."""
        return self.place.rank == 0

    def threads(self, chosen: int | None, cores: int) -> int:
        """CPU threads of this process: as many as were chosen, and at most its share of the machine's cores."""
        if self.size == 1:
            return chosen or cores
        share = max(1, cores // self.place.local_size)
        return min(chosen or share, share)

    def rows(self, batch_size: int) -> slice:
        """The rows of a batch that are this process's."""
        share = batch_size // self.size
        return slice(self.place.rank * share, (self.place.rank + 1) * share)

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What the first rank makes; an error there is raised there, and ends the others without a word."""
        return make()

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank."""
        return [value]

    def most(self, number: int) -> int:
        """The largest of everybody's numbers."""
        return number

    def sum(self, tensor: "Tensor") -> "Tensor":
        """The sum of everybody's tensors."""
        return tensor

    def apart(self) -> "Ranks":
        """The same ranks on a line of their own: what a thread says there does not cross what the others say."""
        return self

    def agreed(self, interruption: Interruption) -> Signals | None:
        """The signal that has reached any of them; noted for all, so that all stop after the same step."""
        number = self.most(interruption.signal or 0)
        # A signal that comes right now must not be lost: nothing is noted where there is nothing to note.
        if not number:
            return None
        interruption.signal = Signals(number)
        return interruption.signal


ALONE = Ranks(Place())


def place_of(environment: Mapping[str, str]) -> Place:
    """The place that torchrun has given this process; alone where nobody has.

    Raises NapkinError for variables that cannot be.
    """
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return Place()

    def number(name: str, default: str = "") -> int:
        value = environment.get(name, default)
        if not value.isdecimal():
            raise NapkinError(f"the environment's {name} is '{value}', not a number: start ranks with torchrun")
        return int(value)

    rank, size, local_rank = number("RANK"), number("WORLD_SIZE"), number("LOCAL_RANK")
    local_size = number("LOCAL_WORLD_SIZE", str(local_rank + 1))
    if not (rank < size and local_rank < local_size <= size):
        raise NapkinError(
            f"the environment says rank {rank} of {size}, {local_rank} of {local_size} on this machine, which cannot "
            "be: start ranks with torchrun"
        )
    return Place(rank, size, local_rank, local_size, number("TORCHELASTIC_RESTART_COUNT", "0"))


@contextmanager
def joined(training: "TrainingConfig") -> Iterator[Ranks]:
    """This process's job while the block runs, which none leaves before all have come to its end.

    Raises NapkinError, of one line, where another process is gone or does not answer in `rank_timeout` seconds.
    """
    place = place_of(os.environ)
    if place.size == 1:
        yield Ranks(place)
        return
    from napkin.distributed.process_group import join

    with join(place, device=training.device, timeout=training.rank_timeout) as ranks:
        yield ranks
