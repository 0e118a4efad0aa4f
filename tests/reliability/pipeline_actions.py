"""A job like `rank_cases` that leaves, for each case, what each rank of a pipeline has done in a step, in order."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from napkin.distributed.joining import join_ranks
from napkin.recipe.training_config import TrainingConfig
from reliability.rank_cases import Case, train_state_of
from reliability.ranks import fork_ranks

done: list[tuple[int, str, int]] = []


def record(name: str, kind: Callable[[dict[str, Any]], str]) -> None:
    """Note each call of a method of torch's stages, after which the stage has done that."""
    method = getattr(PipelineStage, name)

    def noting(stage: PipelineStage, micro_batch: int, *arguments: Any, **options: Any) -> Any:
        if stage.has_backward or name == "forward_one_chunk":
            done.append((stage.stage_index, kind(options), micro_batch))
        return method(stage, micro_batch, *arguments, **options)

    setattr(PipelineStage, name, noting)


def take_one_step_of_each(folder: Path) -> None:
    """What each rank does in a step, and in an evaluation after it."""
    record("forward_one_chunk", lambda options: "forward")
    record("backward_one_chunk", lambda options: "backward" if options.get("full_backward", True) else "backward_input")
    record("backward_weight_one_chunk", lambda options: "backward_weight")
    cases: dict[str, Case] = json.loads((folder / "cases.json").read_text())
    with join_ranks(TrainingConfig(device="cpu", rank_timeout=300.0)) as ranks:
        for name, case in cases.items():
            train_state = train_state_of(case, ranks)
            tokens = torch.arange(train_state.recipe.training.batch_size * 16).view(-1, 16) % 61
            done.clear()
            train_state.step(0, tokens, tokens)
            trained = list(done)
            done.clear()
            train_state.model.eval()
            # Of another size than the micro-batches.
            nats = train_state.parallel_model.evaluation_nats(tokens[:3], tokens[:3])
            left = {"trained": trained, "evaluated": done, "experts": train_state.expert_tokens(), "nats": float(nats)}
            (folder / f"{name}-{ranks.info.rank}.json").write_text(json.dumps(left))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sys.exit(fork_ranks(lambda rank: take_one_step_of_each(folder), int(sys.argv[2]), int(sys.argv[3])))
