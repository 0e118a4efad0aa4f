"""Opening a run on several ranks; here the ranks are played one after the other in one process."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from napkin.distributed.ranks import RankInfo, Ranks
from napkin.errors import NapkinError
from napkin.files import atomic_write_text
from napkin.recipe.toml_file import format_recipe
from napkin.training.pretraining import Pretraining
from napkin.training.run import create_run, open_run
from oracles.tiny_run import tiny_recipe, write_tiny_text


class RecordingRanks(Ranks):
    """Rank 0 of two, which writes down what it broadcasts."""

    def __init__(self) -> None:
        super().__init__(RankInfo(rank=0, world_size=2, local_rank=0, local_world_size=2))
        self.broadcasts: list[Any] = []

    def broadcast_from_zero(self, make: Callable[[], Any]) -> Any:
        self.broadcasts.append(make())
        return self.broadcasts[-1]


class ReceivingRanks(Ranks):
    """Rank 1 of two, which receives what rank 0 has broadcast."""

    def __init__(self, broadcasts: list[Any]) -> None:
        super().__init__(RankInfo(rank=1, world_size=2, local_rank=1, local_world_size=2))
        self.broadcasts = broadcasts

    def broadcast_from_zero(self, make: Callable[[], Any]) -> Any:
        return self.broadcasts.pop(0)


@pytest.mark.thorough
def test_all_ranks_take_the_micro_batch_size_that_rank_0_resolves(tmp_path: Path) -> None:
    write_tiny_text(tmp_path)
    folder = tmp_path / "run"
    zero = RecordingRanks()
    _, run = create_run(tiny_recipe(tmp_path, batch_size=8), folder, ranks=zero)
    # As a user may edit it before resuming.
    open_recipe = dataclasses.replace(
        run.recipe, training=dataclasses.replace(run.recipe.training, micro_batch_size="auto")
    )
    atomic_write_text(folder / "recipe.toml", format_recipe(open_recipe), overwrite=True)

    zero = RecordingRanks()
    resolved = open_run(folder, ranks=zero)[0].recipe.training.micro_batch_size
    assert resolved == 4
    assert open_run(folder, ranks=ReceivingRanks(zero.broadcasts))[0].recipe.training.micro_batch_size == resolved
    # Rank 0 may have less free memory than rank 1: its answer is taken whatever would fit here.
    assert open_run(folder, ranks=ReceivingRanks([2]))[0].recipe.training.micro_batch_size == 2


def test_a_run_that_was_moved_with_its_text_is_resumed_on_it(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    write_tiny_text(before)
    create_run(tiny_recipe(before), before / "runs" / "a")
    before.rename(after)
    preparation, run = open_run(after / "runs" / "a")
    assert isinstance(preparation, Pretraining)
    assert preparation.train_tokens.n_tokens > 1000
    assert [run.recipe.data.train, run.recipe.data.validation] == [
        str(after / "train.tokens"),
        str(after / "validation.tokens"),
    ]
    (after / "train.tokens").unlink()
    with pytest.raises(NapkinError, match=r"after/train\.tokens"):
        open_run(after / "runs" / "a")
