"""Recipes of tuning: a recipe whose model starts from another, with a table of its method.

data.train and data.validation name files of conversations or pairs; reinforcement learning reads none.
training.batch_size counts conversations, pairs or prompts. [model] is that of tuning.start.

Beside the recipes stand their tables: [adapter], small matrices that are trained in place of the weights; [preference],
how a model learns from pairs of answers; [rl], how it learns from rewards of its own answers; [tuning], from which
model tuning starts, on what, and how sequences are packed.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, TypeVar

from napkin.bounds import Bounds, refuse_outside
from napkin.errors import NapkinError
from napkin.model.config import refuse_unknown_matrices
from napkin.recipe.data_config import DataConfig
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import OptimizerConfig


@dataclass(frozen=True)
class AdapterConfig:
    """Small matrices that are trained in place of the weights."""

    kind: Literal["none", "lora", "dora"] = "none"
    """none trains all weights; lora adds a product of two small matrices to each chosen matrix, and trains only these
    (Hu et al. 2021); dora learns the length of each row besides (Liu et al. 2024)."""

    rank: Annotated[int, Bounds(1, 2**16)] = 8
    """Rows of the first small matrix, columns of the second."""

    alpha: float = 16.0
    """The product is multiplied by alpha / rank."""

    modules: tuple[str, ...] = ("attention", "mlp")
    """Whose matrices get one: attention, mlp, head, or one matrix of each block: attention.query, attention.key,
    attention.value, attention.output, mlp.gate, mlp.up, mlp.down."""

    seed: int = 0
    """Seed of the first matrices; the second ones start at 0."""

    frozen: Literal["auto", "fp32"] = "auto"
    """Number format in which frozen matrices are stored: auto is the format in which products read them, which with
    bf16 halves the bytes and gives the same results; fp32 keeps all digits for the model into which adapters are
    merged."""

    def __post_init__(self) -> None:
        refuse_outside("adapter", self)
        if not 0 < self.alpha <= 1e6:
            raise NapkinError(f"adapter.alpha is {self.alpha}: use a number above 0, at most 1e6")
        if not self.modules:
            raise NapkinError("adapter.modules names nothing: name some, such as attention mlp")
        refuse_unknown_matrices(self.modules)


PreferenceObjective = Literal["dpo", "ipo", "kto", "orpo", "simpo"]


@dataclass(frozen=True)
class PreferenceConfig:
    """Settings for learning from pairs of answers."""

    objective: PreferenceObjective = "dpo"
    """dpo (Rafailov et al. 2023), ipo (Azar et al. 2023), kto (Ethayarajh et al. 2024), orpo (Hong et al. 2024) or
    simpo (Meng et al. 2024). orpo and simpo need no reference."""

    beta: float = 0.1
    """Weight of a difference in log-probability; for simpo 2.0 is usual, for orpo it is the weight of the odds
    ratio."""

    margin: float = 0.0
    """simpo: by how much the chosen answer should win."""

    label_smoothing: float = 0.0
    """dpo: the probability that a pair is the wrong way round (Mitchell 2023)."""

    supervised_weight: float = 0.0
    """Weight of the chosen answer's negative log-likelihood that is added to the loss, for dpo."""

    desirable_weight: float = 1.0
    """kto: weight of good answers."""

    undesirable_weight: float = 1.0
    """kto: weight of bad answers."""

    per_token: bool = False
    """Whether an answer's log-probability is the mean over its tokens instead of the sum, so that long answers do not
    count more; ipo, orpo and simpo always take means."""

    def __post_init__(self) -> None:
        if not 0 < self.beta <= 1e4:
            raise NapkinError(f"preference.beta is {self.beta}: use a number above 0, at most 1e4")
        if not 0 <= self.label_smoothing < 0.5:
            raise NapkinError(f"preference.label_smoothing is {self.label_smoothing}: use 0 up to, not including, 0.5")
        for name in ("margin", "supervised_weight", "desirable_weight", "undesirable_weight"):
            if not 0 <= getattr(self, name) <= 1e4:
                raise NapkinError(f"preference.{name} is {getattr(self, name)}: use 0 to 1e4")
        for name, objective in _ONLY_OF.items():
            default = self.__dataclass_fields__[name].default
            if getattr(self, name) != default and self.objective != objective:
                raise NapkinError(
                    f"preference.{name} is {getattr(self, name)}, and {self.objective} does not read it: leave it at "
                    f"{default}, or use the objective {objective}"
                )

    @property
    def has_reference(self) -> bool:
        """True if the objective compares with the model that tuning starts from."""
        return self.objective in ("dpo", "ipo", "kto")

    @property
    def takes_means(self) -> bool:
        """True if an answer's log-probability is the mean over its tokens."""
        return self.per_token or self.objective in ("ipo", "orpo", "simpo")


_ONLY_OF: dict[str, PreferenceObjective] = {
    "margin": "simpo",
    "label_smoothing": "dpo",
    "supervised_weight": "dpo",
    "desirable_weight": "kto",
    "undesirable_weight": "kto",
}


SamplerCorrection = Literal["token", "token mask", "sequence", "sequence mask"]
PolicyAlgorithm = Literal[
    "expert-iteration", "reinforce", "rloo", "ppo", "grpo", "dr-grpo", "dapo", "cispo", "gspo", "maxrl"
]


@dataclass(frozen=True)
class ReinforcementConfig:
    """Settings for learning from rewards of the model's own answers."""

    algorithm: PolicyAlgorithm = "grpo"
    """Sets the parts below that are left at auto: expert-iteration learns the answers with rewards; reinforce and rloo
    (Ahmadian et al. 2024); ppo (Schulman et al. 2017) with a value head; grpo (Shao et al. 2024), dr-grpo (Liu et al.
    2025), dapo (Yu et al. 2025), cispo (MiniMax 2025), gspo (Zheng et al. 2025), maxrl (Tajwar et al. 2026)."""

    environment: str = "arithmetic"
    """Where prompts and rewards come from: arithmetic, sums, sorting, copying, maze, or FILE.py:NAME of your own; or a
    JSONL file of prompts with answers, which `reward` judges."""

    reward: str = "math"
    """Reward for prompts of a file: exact, number, math, choice, regex, code, format:TAG,TAG, FILE.py:NAME of a
    function of your own, or a sum of several, such as "math + 0.2 * format:think,answer"."""

    tools: str = ""
    """Programs that the model may call before it answers, and whose output it reads: python, calculator, or both with a
    comma between them. An answer's turn with a call is followed by the tool's."""

    tool_calls: Annotated[int, Bounds(1, 1000)] = 4
    """Calls in an answer, at most; the next turn is the last."""

    tool_output: Annotated[int, Bounds(1, 2**20)] = 1000
    """Longest output of a call in bytes; a longer one is cut, and says so."""

    tool_seconds: Annotated[float, Bounds(0.1, 3600)] = 5.0
    """Longest time of a call."""

    group_size: Annotated[int, Bounds(1, 2**20)] = 8
    """Answers to each prompt; training.batch_size is the number of prompts in a step."""

    max_answer: Annotated[int, Bounds(1, 2**24)] = 128
    """Longest answer in tokens; a longer one is cut, and counted. Where there are tools, of each turn."""

    temperature: Annotated[float, Bounds(1e-3, 100)] = 1.0
    """Temperature of sampling; log-probabilities are those at this temperature."""

    updates_per_rollout: Annotated[int, Bounds(1, 2**20)] = 1
    """Optimizer updates on the answers of one step: each on its part of the groups, as often as `epochs` says."""

    epochs: Annotated[int, Bounds(1, 1000)] = 1
    """Number of passes over each step's answers."""

    advantage: Literal["auto", "group", "group mean", "group success", "leave one out", "batch", "none", "gae"] = "auto"
    """What a reward is compared with: the group's mean, in units of its standard deviation; the group's mean; the same
    in units of that mean; the mean of the others in the group; the batch's mean; nothing; or the value head's estimate,
    by generalised advantage estimation."""

    ratio: Literal["auto", "token", "sequence", "none"] = "auto"
    """Importance ratio of new to old probability: of a token, of a sequence by its mean (GSPO), or none."""

    clip: Literal["auto", "ppo", "cispo", "none"] = "auto"
    """ppo takes the worse of the clipped and the plain ratio; cispo bounds the ratio as a weight without gradient."""

    clip_low: Annotated[float | None, Bounds(0, 1e4)] = None
    """The ratio is clipped below 1 minus this; None is the algorithm's."""

    clip_high: Annotated[float | None, Bounds(0, 1e4)] = None
    """The ratio is clipped above 1 plus this; None is the algorithm's."""

    normalisation: Literal["auto", "token", "sequence", "constant"] = "auto"
    """What a token's term is divided by; constant is max_answer, the same for every sequence."""

    kl_weight: Annotated[float, Bounds(0, 1e4)] = 0.0
    """Weight of the divergence from the model that training started from; above 0, its weights are held too."""

    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence (Schulman 2020)."""

    entropy_weight: Annotated[float, Bounds(0, 1e4)] = 0.0
    """Weight of the entropy, which is maximised."""

    drop_equal_groups: bool | None = None
    """Whether groups with one reward for all answers, which teach nothing, are left out of the counts that terms are
    divided by. None is the algorithm's: dapo drops them."""

    redraws: Annotated[int | None, Bounds(0, 1000)] = None
    """How often prompts are drawn again to replace those whose answers all had one reward (dynamic sampling). None is
    the algorithm's: 9 for dapo, 0 for the others."""

    overlong: Literal["auto", "keep", "mask", "penalty"] = "auto"
    """Answers that are cut: learned from as they are; not learned from; or with a smaller reward the nearer an answer
    comes to max_answer (DAPO)."""

    seed: Annotated[int, Bounds(0, 2**62)] = 0
    """Seed of prompts and of sampling."""

    evaluation_prompts: Annotated[int, Bounds(0, 2**20)] = 128
    """Held-out prompts that an evaluation answers greedily."""

    value_weight: Annotated[float, Bounds(0, 1e4)] = 0.5
    """ppo: weight of the value head's loss."""

    gae_lambda: Annotated[float, Bounds(0, 1)] = 0.95
    """ppo: decay of generalised advantage estimation."""

    value_clip: Annotated[float, Bounds(0, 1e4)] = 0.2
    """ppo: by how much a value may change from the sampler's before its loss holds it back; 0 is no limit."""

    overlong_window: Annotated[int, Bounds(0, 2**24)] = 0
    """penalty: over how many tokens before max_answer it rises; 0 is a fifth of max_answer."""

    sampler_ratio_limit: Annotated[float, Bounds(0, 1e4)] = 0.0
    """Above 0, terms are weighted by the trainer's probability over the sampler's, limited to this as
    `sampler_correction` says, which takes one more forward pass; 0 leaves it out."""

    sampler_correction: SamplerCorrection = "token"
    """Whether the ratio is that of a token or of the whole answer (sequence), and what happens beyond the limit:
    truncated to it, or left out of the loss (mask)."""

    answers_at_a_time: Annotated[int, Bounds(1, 2**20)] = 256
    """Answers that are drawn together, at most: more are faster, and take more memory for keys and values."""

    def __post_init__(self) -> None:
        refuse_outside("rl", self)


@dataclass(frozen=True)
class DistillationConfig:
    """Settings for learning from a teacher's distributions of tokens."""

    teacher: str = ""
    """Run or Hugging Face folder with the same tokenizer that computes beside the student; or a file of `napkin tune
    teach`, which has its likeliest tokens."""

    weight: Annotated[float, Bounds(0, 1)] = 0.5
    """Weight of the divergence from the teacher; the tokens of the text themselves have 1 minus this."""

    temperature: Annotated[float, Bounds(0.01, 100)] = 1.0
    """Logits of both are divided by it for the divergence, which is multiplied by its square (Hinton et al. 2015); with
    a file, that of the file."""

    def __post_init__(self) -> None:
        refuse_outside("distillation", self)


TuningMethod = Literal["sft", "preference", "reward-model", "rl", "distill"]


@dataclass(frozen=True)
class TuningConfig:
    """The model from which tuning starts, and how sequences are packed."""

    method: TuningMethod = "sft"
    """The training signal: answers, pairs of answers, or rewards of answers; set by the command."""

    start: str = ""
    """The model that tuning starts from: a run, a Hugging Face folder, or a GGUF file."""

    learned: Literal["assistant", "last", "all"] = "assistant"
    """Which tokens of a conversation count in the loss: all turns of the assistant, only its last turn, or all
    tokens."""

    chat_template: str = ""
    """A file with the chat template, in jinja's language; "" is the start's own, or for a model without one the
    built-in: a line per message that begins with its role."""

    max_length: int = 0
    """Longest sequence in tokens; 0 is the model's context length. Longer conversations are left out, and counted."""

    normalisation: Literal["token", "sequence", "constant"] = "token"
    """How the loss is averaged: over all trained tokens of the batch; over sequences, each with its own mean; or over
    sequences, each with its sum divided by the constant max_length."""

    arrangement: Literal["auto", "packed", "bucketed", "padded"] = "auto"
    """Whether a row holds several sequences, masked from each other, or one and padding. The gradient is the same.
    packed has rows as long as the longest sequence: sequences of equal length then have a row each; bucketed has rows
    of two lengths, in micro-batches of at most eight shapes, with more padding. auto is packed on a CPU, and bucketed
    on a GPU, whose libraries prepare a kernel for each new shape."""

    micro_batch_tokens: int = 0
    """Tokens of a forward and backward pass, padding included; 0 is 4,096, or a sequence if that is longer. The
    gradient is the same."""

    def __post_init__(self) -> None:
        for name in ("max_length", "micro_batch_tokens"):
            if not 0 <= getattr(self, name) <= 2**34:
                raise NapkinError(f"tuning.{name} is {getattr(self, name)}: use 1 to {2**34}, or 0 for the default")


def _optimizer() -> OptimizerConfig:
    # Steps are smaller than in pre-training, so that the model keeps what it knows.
    return OptimizerConfig(learning_rate=1e-5, weight_decay=0.0, schedule="linear")


def _data() -> DataConfig:
    return DataConfig(train="", validation=None, tokenizer="")


@dataclass(frozen=True)
class TuningRecipe(Recipe):
    """Everything that is chosen for tuning a model."""

    METHOD: ClassVar[str] = "napkin.tuning.example_method:SupervisedMethod"
    data: DataConfig = field(default_factory=_data)
    optimizer: OptimizerConfig = field(default_factory=_optimizer)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)


@dataclass(frozen=True)
class PreferenceRecipe(TuningRecipe):
    """Tuning on pairs of answers."""

    METHOD: ClassVar[str] = "napkin.tuning.preference_method:PreferenceMethod"
    tuning: TuningConfig = field(default_factory=lambda: TuningConfig(method="preference"))
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)


@dataclass(frozen=True)
class RewardModelRecipe(TuningRecipe):
    """Training of a reward model, which judges which of two answers is better."""

    METHOD: ClassVar[str] = "napkin.tuning.preference_method:RewardModelMethod"
    tuning: TuningConfig = field(default_factory=lambda: TuningConfig(method="reward-model"))


@dataclass(frozen=True)
class ReinforcementRecipe(TuningRecipe):
    """Tuning on rewards of the model's own answers."""

    METHOD: ClassVar[str] = "napkin.tuning.reinforcement_method:ReinforcementMethod"
    tuning: TuningConfig = field(default_factory=lambda: TuningConfig(method="rl"))
    rl: ReinforcementConfig = field(default_factory=ReinforcementConfig)


@dataclass(frozen=True)
class DistillationRecipe(TuningRecipe):
    """Tuning on a teacher's distributions of tokens."""

    METHOD: ClassVar[str] = "napkin.tuning.distillation_method:DistillationMethod"
    tuning: TuningConfig = field(default_factory=lambda: TuningConfig(method="distill"))
    distillation: DistillationConfig = field(default_factory=DistillationConfig)


RECIPE_OF: dict[TuningMethod, type[TuningRecipe]] = {
    "sft": TuningRecipe,
    "preference": PreferenceRecipe,
    "reward-model": RewardModelRecipe,
    "rl": ReinforcementRecipe,
    "distill": DistillationRecipe,
}
FIRST_FIELDS = (
    *("tuning.start", "data.train", "data.validation", "rl.environment", "rl.reward", "rl.algorithm"),
    *("preference.objective", "distillation.teacher", "adapter.kind", "adapter.rank", "optimizer.learning_rate"),
    *("training.steps", "training.batch_size", "training.precision"),
)
"""The fields that help and forms show first, those that a recipe has."""
AnyTuningRecipe = TypeVar("AnyTuningRecipe", bound=TuningRecipe)
