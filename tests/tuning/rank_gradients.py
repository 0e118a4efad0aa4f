"""A job of some ranks that computes the gradients of `oracles.alignment_cases`, by DDP and by FSDP.

Its arguments are a folder, how many ranks there are, and a free port. Rank 0 leaves gradients.safetensors: by case,
strategy and size of micro-batches, the gradient, and the weights after a step of reinforcement; and figures.json, what
the steps told.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from napkin.distributed.joining import join_ranks
from napkin.distributed.ranks import Ranks
from napkin.recipe.precision import Precision
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.recipe.tuning_recipe import ReinforcementConfig, ReinforcementRecipe
from napkin.train_step.step import build_train_state
from napkin.tuning.reinforcement_step import ReinforcementSettings, train_on_rollouts
from napkin.tuning.sequence_step import score_examples
from oracles.alignment_cases import CASES, WITH_SCALAR_HEAD, gradient_of, train_state_of
from oracles.letter_games import CONFIG, Letters, Turns
from reliability.rank_cases import leave_groups
from reliability.ranks import fork_ranks


def sizes_of(case: str) -> tuple[int, ...]:
    """The sizes of micro-batches that a case is computed in: with 1, each example is one."""
    return (1, 64) if case == "supervised, sequence" else (64,)


def weights_after_reinforcement(ranks: Ranks, prompts: Sequence[int], *, updates: int) -> Tensor:
    """All weights after a step on answers to four prompts, of which this rank has these, in several updates."""
    recipe = ReinforcementRecipe(
        model=CONFIG,
        optimizer=OptimizerConfig(name="sgd", learning_rate=1.0, schedule="constant", clip_norm=1e9, warmup_steps=0),
        training=TrainingConfig(batch_size=4, init_seed=1, steps=10, device="cpu", precision="fp32"),
    )
    train_state = build_train_state(ResolvedRecipe(recipe, Precision("fp32", "cpu")), ranks)
    with torch.no_grad():
        train_state.model.head_weight.mul_(4)
    config = ReinforcementConfig(group_size=3, max_answer=8, temperature=0.7, seed=5, updates_per_rollout=updates)
    outcome = train_on_rollouts(
        train_state, 0, prompts, ReinforcementSettings(config, Turns(), Letters(), max_tokens=64)
    )
    assert outcome.updates == updates
    return torch.cat([parameter.detach().flatten() for parameter in train_state.model.parameters()])


def compute_cases(folder: Path) -> None:
    """Compute all cases on this rank."""
    gradients, metrics = {}, {}
    with join_ranks(TrainingConfig(device="cpu", rank_timeout=60.0)) as ranks:
        for strategy in ("ddp", "fsdp"):
            train_state = train_state_of(ranks, parallelism=strategy)
            with_scalar_head = train_state_of(ranks, parallelism=strategy, scalar_head=True)
            for name, make in CASES.items():
                objective, examples = make()
                trained = with_scalar_head if name in WITH_SCALAR_HEAD else train_state
                for max_tokens in sizes_of(name):
                    key = f"{name}, {strategy}, {max_tokens}"
                    gradients[key], step = gradient_of(trained, examples, objective, max_tokens=max_tokens)
                    metrics[key] = dataclasses.asdict(step)
            objective, examples = CASES["supervised, token"]()
            scores = score_examples(train_state.parallel_model, examples, max_tokens=64)
            gradients[f"scores, {strategy}"] = torch.cat(
                [torch.from_numpy(each.log_probabilities) for example in scores for each in example]
            )
            # Fewer examples than ranks.
            gradients[f"one example, {strategy}"], _ = gradient_of(train_state, examples[:1], objective)
            leave_groups(ranks)
        # The ranks after the first have one prompt each, so that places among a rank's own are not those among all.
        size, rank = ranks.world_size, ranks.info.rank
        own = range(5 - size) if rank == 0 else [4 - size + rank]
        gradients["reinforcement"] = weights_after_reinforcement(ranks, own, updates=2)
        leave_groups(ranks)
        if ranks.is_rank_zero:
            save_file(gradients, folder / "gradients.safetensors")
            (folder / "figures.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sys.exit(fork_ranks(lambda rank: compute_cases(folder), int(sys.argv[2]), int(sys.argv[3])))
