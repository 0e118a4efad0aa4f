"""[rl] of a recipe: how a model learns from rewards of its own answers."""

from dataclasses import dataclass
from typing import Literal

from napkin.errors import NapkinError

PolicyAlgorithm = Literal["expert-iteration", "reinforce", "rloo", "ppo", "grpo", "dr-grpo", "dapo", "cispo", "gspo"]


@dataclass(frozen=True)
class ReinforcementConfig:
    """How a model learns from rewards of its own answers."""

    algorithm: PolicyAlgorithm = "grpo"
    """Sets the parts below that are left at auto: expert-iteration learns the answers with rewards; reinforce and rloo
    (Ahmadian et al. 2024); ppo (Schulman et al. 2017) with a value head; grpo (Shao et al. 2024), dr-grpo (Liu et al.
    2025), dapo (Yu et al. 2025), cispo (MiniMax 2025), gspo (Zheng et al. 2025)."""

    environment: str = "arithmetic"
    """Where prompts and rewards come from: arithmetic, sums, sorting, copying, maze, or FILE.py:NAME of your own; or a
    JSONL file of prompts with answers, which `reward` judges."""

    reward: str = "math"
    """For prompts of a file: exact, number, math, choice, regex, code, or FILE.py:NAME of a function of your own."""

    group_size: int = 8
    """Answers to each prompt; training.batch_size is the number of prompts in a step."""

    max_answer: int = 128
    """Longest answer in tokens; a longer one is cut, and counted."""

    temperature: float = 1.0
    """Of sampling; log-probabilities are those at this temperature."""

    updates_per_rollout: int = 1
    """Optimizer updates on the answers of one step: each on its part of the groups, as often as `epochs` says."""

    epochs: int = 1
    """How often each answer is learned from."""

    advantage: Literal["auto", "group", "group mean", "leave one out", "batch", "none", "gae"] = "auto"
    """A reward beside what: the group's mean in units of its standard deviation; the group's mean; that of the others
    in the group; the batch's; nothing; or the value head's, by generalised advantage estimation."""

    ratio: Literal["auto", "token", "sequence", "none"] = "auto"
    """Importance ratio of new to old probability: of a token, of a sequence by its mean (GSPO), or none."""

    clip: Literal["auto", "ppo", "cispo", "none"] = "auto"
    """ppo takes the worse of the clipped and the plain ratio; cispo bounds the ratio as a weight without gradient."""

    clip_low: float | None = None
    """The ratio is clipped below 1 minus this; None is the algorithm's."""

    clip_high: float | None = None
    """The ratio is clipped above 1 plus this; None is the algorithm's."""

    normalisation: Literal["auto", "token", "sequence", "constant"] = "auto"
    """What a token's term is divided by; constant is max_answer, for every sequence alike."""

    kl_weight: float = 0.0
    """Weight of the divergence from the model that training started from; above 0, its weights are held too."""

    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of the divergence (Schulman 2020)."""

    entropy_weight: float = 0.0
    """Weight of the entropy, which is made larger."""

    drop_equal_groups: bool | None = None
    """Whether groups with one reward for all answers, which teach nothing, are left out of the counts that terms are
    divided by. None is the algorithm's: dapo drops them."""

    overlong: Literal["auto", "keep", "mask", "penalty"] = "auto"
    """Answers that are cut: learned from as they are; not learned from; or with a smaller reward the nearer an answer
    comes to max_answer (DAPO)."""

    seed: int = 0
    """Of prompts and of sampling."""

    evaluation_prompts: int = 128
    """Held-out prompts that an evaluation answers greedily."""

    value_weight: float = 0.5
    """ppo: weight of the value head's loss."""

    gae_lambda: float = 0.95
    """ppo: decay of generalised advantage estimation."""

    value_clip: float = 0.2
    """ppo: by how much a value may change from the sampler's before its loss holds it back; 0 is no limit."""

    overlong_window: int = 0
    """penalty: over how many tokens before max_answer it rises; 0 is a fifth of max_answer."""

    sampler_ratio_limit: float = 0.0
    """Above 0, terms are weighted by the trainer's probability of a token over the sampler's, at most this: truncated
    importance sampling (Yao et al. 2025), which takes one more forward pass; 0 leaves it out."""

    answers_at_a_time: int = 256
    """Answers that are drawn together, at most: more are faster, and take more memory for keys and values."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("group_size", 1, 2**20),
            ("max_answer", 1, 2**24),
            ("updates_per_rollout", 1, 2**20),
            ("answers_at_a_time", 1, 2**20),
            ("epochs", 1, 1000),
            ("temperature", 1e-3, 100),
            ("kl_weight", 0, 1e4),
            ("entropy_weight", 0, 1e4),
            ("value_weight", 0, 1e4),
            ("gae_lambda", 0, 1),
            ("value_clip", 0, 1e4),
            ("overlong_window", 0, 2**24),
            ("sampler_ratio_limit", 0, 1e4),
            ("clip_low", 0, 1e4),
            ("clip_high", 0, 1e4),
            ("evaluation_prompts", 0, 2**20),
            ("seed", 0, 2**62),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise NapkinError(f"rl.{name} is {value}: use {least} to {most}")
