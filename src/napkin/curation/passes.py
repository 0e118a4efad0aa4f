"""The passes of a pipeline over its shards: a new one begins at each stage that has to see all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from napkin.curation.registry import Stage
from napkin.curation.stage import CorpusStage, RecordStage


@dataclass(frozen=True)
class Pass:
    """What is done to each shard alone, in one process."""

    number: int
    decided: CorpusStage | None
    """The stage whose decisions are applied first."""
    stages: tuple[RecordStage, ...]
    """Those that follow."""
    summarized: CorpusStage | None
    """The stage that comes next, for which the shard is summarized and kept; None in the last pass."""
    first_stage: int
    """The number of its first stage in the pipeline, from 0."""

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        """Those that may drop records, in order."""
        return self.stages if self.decided is None else (self.decided, *self.stages)


def divide_into_passes(stages: Sequence[Stage]) -> list[Pass]:
    """The passes of a pipeline's stages; there is at least one."""
    passes: list[Pass] = []
    decided: CorpusStage | None = None
    run: list[RecordStage] = []
    first = 0
    for number, stage in enumerate(stages):
        if isinstance(stage, CorpusStage):
            passes.append(Pass(len(passes), decided, tuple(run), stage, first))
            decided, run, first = stage, [], number
        else:
            run.append(stage)
    return [*passes, Pass(len(passes), decided, tuple(run), None, first)]
