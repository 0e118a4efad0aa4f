"""Advantages of a group of completions: what each algorithm makes of rewards, and how much each token then weighs."""

from typing import Annotated, Any

import msgspec

from napkin.errors import NapkinError
from napkin.recipe.tuning_recipe import PolicyAlgorithm, ReinforcementConfig
from napkin.studio.learn.idea import Idea

MOST_COMPLETIONS = 16
LONGEST = 10_000
"""Tokens of a completion."""
COMPARED = {
    "group": "GRPO: (r − mean) / standard deviation",
    "group mean": "Dr. GRPO: r − mean",
    "leave one out": "RLOO: r − mean of the others",
    "group success": "MaxRL: (r − mean) / mean",
}


class RewardRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The completions of one prompt."""

    rewards: Annotated[str, msgspec.Meta(max_length=400)] = "1, 0, 0, 1, 0, 0, 0, 0"
    lengths: Annotated[str, msgspec.Meta(max_length=400)] = "40, 120, 60, 80, 100, 30, 150, 110"
    algorithm: PolicyAlgorithm = "grpo"
    max_answer: Annotated[int, msgspec.Meta(ge=1, le=LONGEST)] = 128


def reward_answer(asked: RewardRequest) -> dict[str, Any]:
    """The advantage of each completion, by the chosen algorithm and by others, and the weight of its tokens.

    Raises NapkinError for texts that are not one number per completion.
    """
    from napkin.tuning.policy_gradient import advantages_of, parts_of

    rewards = _numbers(asked.rewards, "rewards")
    given = _numbers(asked.lengths, "lengths")
    if len(given) != len(rewards):
        raise NapkinError(f"there are {len(rewards)} rewards and {len(given)} lengths: give one of each per completion")
    for length in given:
        if not 1 <= length <= LONGEST or length != int(length):
            raise NapkinError(f"a length is {length:g}: use whole numbers of tokens, 1 to {LONGEST:,}")
    if asked.algorithm == "ppo":
        raise NapkinError("the advantages of ppo are those of a value head, not of rewards alone: use another")
    # No completion is longer than an answer may be.
    lengths = [min(int(length), asked.max_answer) for length in given]
    config = ReinforcementConfig(algorithm=asked.algorithm, max_answer=asked.max_answer, group_size=len(rewards))
    parts = parts_of(config)
    credit = advantages_of(config, [rewards], [lengths])
    trained_on, advantages = credit.trained_on[0].tolist(), credit.advantages[0].tolist()
    weights = _weights(lengths, trained_on, parts.normalisation, asked.max_answer)
    return {
        "parts": {"advantage": parts.advantage, "normalisation": parts.normalisation, "clip": parts.clip},
        "mean": sum(rewards) / len(rewards),
        "equal": bool(credit.equal_groups),
        "completions": [
            {
                "reward": reward,
                "shaped": shaped,
                "length": length,
                "advantage": advantage,
                "trained_on": trained,
                "token_weight": weight,
                "pull": weight * advantage * length,
            }
            for reward, shaped, length, advantage, trained, weight in zip(
                rewards, credit.rewards[0].tolist(), lengths, advantages, trained_on, weights, strict=True
            )
        ],
        "compared": [_compared(name, about, rewards) for name, about in COMPARED.items()],
    }


def _numbers(text: str, what: str) -> list[float]:
    words = text.replace(",", " ").split()
    try:
        numbers = [float(each) for each in words]
    except ValueError:
        raise NapkinError(f"{what} are '{text[:60]}': give numbers with commas between them, as 1, 0, 0.5") from None
    if not 2 <= len(numbers) <= MOST_COMPLETIONS:
        raise NapkinError(f"there are {len(numbers)} {what}: give 2 to {MOST_COMPLETIONS}")
    return numbers


def _weights(lengths: list[int], trained_on: list[bool], normalisation: Any, constant: int) -> list[float]:
    """The factor by which the loss multiplies each token's term, per completion; 0 for those that are left out."""
    import torch

    from napkin.chats.token_sequence import sequence_of
    from napkin.tuning.packing import micro_batches_of
    from napkin.tuning.sequence_step import normalised_weights, totals_of

    used = [number for number, trained in enumerate(trained_on) if trained]
    weights = [0.0] * len(lengths)
    if used:
        examples = [(sequence_of([0], [0] * lengths[number]),) for number in used]
        (part,) = micro_batches_of(examples, max_tokens=2**30, row_length=LONGEST + 1, packing="padded")
        of_tokens = normalised_weights(part, totals_of([part]), normalisation, constant, dtype=torch.float64)
        # All tokens of a completion have the same weight; the micro-batch has its own order.
        for place, weight in zip(part.sequence.tolist(), of_tokens.tolist(), strict=True):
            weights[used[part.example_numbers[place]]] = weight
    return weights


def _compared(name: str, about: str, rewards: list[float]) -> dict[str, Any]:
    import torch

    from napkin.tuning.policy_gradient import ADVANTAGES

    try:
        advantages = ADVANTAGES[name](torch.tensor([rewards], dtype=torch.float64))[0].tolist()
    except NapkinError as error:
        return {"name": about, "error": str(error).splitlines()[0]}
    return {"name": about, "advantages": advantages}


REWARDS = Idea(
    name="advantages",
    title="GRPO's advantages",
    summary="Rewards of a group of answers: the advantage of each, by GRPO and others, and the weight of its tokens.",
    text=(
        "A model answers one prompt several times, and each answer gets a reward. What matters is how much better it "
        "is than its group: the advantage. Tokens of answers above the mean become more likely, those below it less. "
        "Where all rewards are equal there is nothing to learn.",
        "Dividing by the standard deviation makes easy and hard prompts pull equally hard, also those with a single "
        "success by luck; Dr. GRPO leaves it out, MaxRL divides by the share of successes. How terms are averaged "
        "matters as well: per sequence, a token of a long answer weighs less than one of a short answer; per token, "
        "all weigh the same, and long answers pull more.",
    ),
    formula="GRPO: A = (r − mean) / (std + 1e-4)    Dr. GRPO: A = r − mean    MaxRL: A = (r − mean) / mean\n"
    "loss = −Σ tokens of A · min(ρ, …) / N,  N: tokens of the batch, length · sequences, or a constant · sequences",
    command="napkin tune rl RUN --rl.algorithm grpo --rl.group-size 8",
    files=("tuning/policy_gradient.py", "tuning/sequence_step.py"),
    request=RewardRequest,
    answer=reward_answer,
)
