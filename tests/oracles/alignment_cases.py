"""Objectives of alignment with batches that they train on: what must have one gradient, however it is computed.

An objective that joins `CASES` is held to it by the tests and shown in benchmarks/alignment_invariance.py.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from napkin.chats.token_sequence import Example, TokenSequence
from napkin.distributed.ranks import ALONE, Ranks
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.recipe.tuning_recipe import (
    PolicyAlgorithm,
    PreferenceConfig,
    PreferenceObjective,
    ReinforcementConfig,
    RewardModelRecipe,
)
from napkin.train_step.step import TrainState, build_train_state
from napkin.tuning.distillation_method import DistillationObjective, ModelTeacher
from napkin.tuning.example_method import SupervisedObjective
from napkin.tuning.policy_gradient import SAMPLER, FreshObjective, policy_objective
from napkin.tuning.preferences import DESIRABLE, RewardObjective, preference_objective, rewarded, with_kl_estimate
from napkin.tuning.sequence_step import REFERENCE, Normalisation, Objective, SequenceStep, train_on_examples

MODEL = ModelConfig(vocab_size=29, context_length=32, d_model=16, n_layers=2, n_heads=2)
NORMALISATIONS: tuple[Normalisation, ...] = get_args(Normalisation)
CONSTANT = 20.0
"""What "constant" divides by."""


def some_examples(n: int = 7, size: int = 1) -> list[Example]:
    """`n` examples of `size` sequences of 3 to 19 tokens, of which some count."""
    generator = np.random.default_rng(3)

    def sequence() -> TokenSequence:
        length = int(generator.integers(3, 20))
        loss_mask = generator.random(length) < 0.6
        loss_mask[0], loss_mask[-1] = False, True
        return TokenSequence(generator.integers(0, MODEL.vocab_size, length), loss_mask)

    return [tuple(sequence() for _ in range(size)) for _ in range(n)]


def answers_with_advantages() -> list[Example]:
    """Answers with what a policy's objective reads; ratios are on both sides of 1."""
    generator = np.random.default_rng(4)
    examples: list[Example] = []
    for (sequence,) in some_examples():
        n = sequence.n_trained
        # A model that has learned nothing gives each token about this.
        near = -np.log(MODEL.vocab_size) + generator.normal(0, 0.3, (2, n))
        values = {
            "advantages": np.full(n, generator.normal()),
            "old_log_probabilities": near[0],
            "reference_log_probabilities": near[1],
            SAMPLER: near[0],
            "returns": generator.normal(size=n),
            "old_values": generator.normal(size=n),
        }
        examples.append((sequence.with_values(**{name: each.astype(np.float32) for name, each in values.items()}),))
    return examples


CASES: dict[str, Callable[[], tuple[Objective, list[Example]]]] = {
    f"supervised, {normalisation}": lambda normalisation=normalisation: (
        SupervisedObjective(normalisation, CONSTANT),
        some_examples(),
    )
    for normalisation in NORMALISATIONS
}


def preference_case(config: PreferenceConfig) -> tuple[Objective, list[Example]]:
    """Pairs, or with KTO single answers that know an estimate, with references near what an untrained model says."""
    generator = np.random.default_rng(4)

    def referred(sequence: TokenSequence) -> TokenSequence:
        n = sequence.n_trained
        marks = np.full(n, generator.random() < 0.5, np.float32)
        return sequence.with_values(**{REFERENCE: generator.normal(-3.4, 0.4, n).astype(np.float32), DESIRABLE: marks})

    examples: list[Example] = [tuple(referred(sequence) for sequence in example) for example in some_examples(size=2)]
    if config.objective == "kto":
        examples = list(with_kl_estimate(examples, generator.normal(0.4, 0.2, len(examples)).tolist()))
    return preference_objective(config), examples


CASES |= {
    objective: lambda objective=objective: preference_case(PreferenceConfig(objective, beta=0.3))
    for objective in get_args(PreferenceObjective)
}


def policy_case(algorithm: PolicyAlgorithm) -> Callable[[], tuple[Objective, list[Example]]]:
    """The objective of an algorithm, with all its penalties, and answers."""
    config = ReinforcementConfig(algorithm=algorithm, kl_weight=0.1, entropy_weight=0.01)
    return lambda: (policy_objective(config), answers_with_advantages())


def fresh_case(algorithm: PolicyAlgorithm) -> Callable[[], tuple[Objective, list[Example]]]:
    """That of answers which the same weights have drawn, without penalties: all coefficients are known."""
    objective = FreshObjective(policy_objective(ReinforcementConfig(algorithm=algorithm)))
    return lambda: (objective, answers_with_advantages())


# Each kind of term and each normalisation; the others are in test_policy_gradient_invariance.py.
ALGORITHMS: tuple[PolicyAlgorithm, ...] = ("reinforce", "grpo", "cispo", "gspo")
CASES |= {f"policy, {algorithm}": policy_case(algorithm) for algorithm in ALGORITHMS}
CASES |= {f"fresh answers, {algorithm}": fresh_case(algorithm) for algorithm in ("grpo", "gspo")}


def distillation_case() -> tuple[Objective, list[Example]]:
    """That of a teacher of other weights and another width."""
    teacher = ModelTeacher(dataclasses.replace(MODEL, d_model=24))
    teacher.model = Transformer(teacher.config, seed=7).eval()
    return DistillationObjective(teacher, 0.6, 1.5, "sequence"), some_examples()


CASES["distillation"] = distillation_case

WITH_SCALAR_HEAD = {
    "policy, ppo": policy_case("ppo"),
    "reward model": lambda: (RewardObjective(), [tuple(map(rewarded, example)) for example in some_examples(size=2)]),
}
"""Those of a model with a head of one number, which here has a head over the vocabulary of its own."""
CASES |= WITH_SCALAR_HEAD


def train_state_of(
    ranks: Ranks = ALONE, *, parallelism: str = "ddp", model: ModelConfig = MODEL, scalar_head: bool = False
) -> TrainState:
    """A model in fp32 whose gradients are not clipped."""
    training: dict[str, Any] = {"parallelism": parallelism, "precision": "fp32", "device": "cpu", "batch_size": 4}
    kind = RewardModelRecipe if scalar_head else Recipe
    recipe = kind(
        model=dataclasses.replace(model, tie_embeddings=not scalar_head),
        optimizer=OptimizerConfig(clip_norm=1e9, warmup_steps=0).resolved,
        training=TrainingConfig(**training, kernels="plain"),
    )
    train_state = build_train_state(ResolvedRecipe(recipe, Precision("fp32", "cpu")), ranks)
    if train_state.model.scalar_head is not None:
        # It starts at 0, and no gradient would come through.
        torch.nn.init.constant_(train_state.model.scalar_head.weight, 0.1)
    return train_state


def gradient_of(
    train_state: TrainState, examples: Sequence[Example], objective: Objective, **how: Any
) -> tuple[Tensor, SequenceStep]:
    """The gradient of a batch, in one vector, and the step, whose update is left out; a collective."""
    found: list[Tensor] = []

    def keep(loss: Tensor, norm: Tensor) -> bool:
        for parameter in train_state.model.parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            found.append(whole.detach().flatten())
        return False

    step = train_on_examples(train_state, 0, examples, objective, is_fit=keep, **{"max_tokens": 64, **how})
    return torch.cat(found).clone(), step
