"""A recipe's model and its parts as something to be timed: transformer, block, self-attention, feed-forward layer."""

import dataclasses
from collections.abc import Sequence
from itertools import product
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin.accounting.ledger import Ledger
from napkin.benchmarking.case import Case, Draw, Shape, Subject, Target, count_passes
from napkin.model.attention import ForwardContext
from napkin.model.config import FeedForwardKind, ModelConfig
from napkin.model.transformer import Transformer
from napkin.planning.step.kernel_choice import choose_kernels
from napkin.planning.step.machine import ThisMachine
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import ParallelismConfig
from napkin.torch_compile import set_up_compiler
from napkin.train_step.step import TrainState, build_train_state
from napkin.train_step.step_ledger import count_step

MODULES = {
    "transformer": "a model with its loss",
    "block": "one block of a model",
    "self-attention": "the attention layer of a block, with its projections",
    "mlp": "the feed-forward layer of a block",
}

# Course CS336 of Stanford, assignment 2: the sizes of GPT-2, and GPT-3's 2.7B.
SIZES: dict[str, Shape] = {
    name: {"d_model": d_model, "d_ff": d_ff, "n_layers": n_layers, "n_heads": n_heads}
    for name, d_model, d_ff, n_layers, n_heads in (
        ("small", 768, 3072, 12, 12),
        ("medium", 1024, 4096, 24, 16),
        ("large", 1280, 5120, 36, 20),
        ("xl", 1600, 6400, 48, 25),
        ("2.7B", 2560, 10240, 32, 32),
    )
}
_LENGTHS = (128, 256, 512, 1024)
_SWEEP_BATCH = {"batch_size": 4, "vocab_size": 10_000}
_DIMENSIONS = ("d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "context_length", "vocab_size")
_SMALL_VOCABULARY, _USUAL_VOCABULARY = 16, 4096


class ModuleTarget(Target):
    """One part of the model that a recipe describes."""

    named_sizes = {"size": SIZES}  # noqa: RUF012  never changed

    def __init__(self, name: str, recipe: Recipe, device_type: Literal["cpu", "cuda"]) -> None:
        self.name, self.recipe, self._machine = name, recipe, ThisMachine(device=device_type)
        self.passes = ("forward", "backward", "both", *(["step"] if name == "transformer" else []))
        # Other dimensions make no difference to a part of the model.
        left_out = set() if name == "transformer" else {"n_layers", "vocab_size"}
        left_out |= {"n_heads", "n_kv_heads", "head_dim"} if name == "mlp" else set()
        self.dimensions = tuple(each for each in ("batch_size", *_DIMENSIONS) if each not in left_out)
        self.shapes = ({},)
        self.sweep = [{**size, "context_length": n, **_SWEEP_BATCH} for size, n in product(SIZES.values(), _LENGTHS)]
        if name == "mlp":
            self.forms = get_args(FeedForwardKind)
        else:
            self.forms = ["sdpa", "plain", *(["flex", "flash"] if device_type == "cuda" else [])]

    def whole(self, shape: Shape) -> dict[str, int]:
        """A shape with the recipe's sizes for what it does not name."""
        model = self._config(shape)
        batch_size = shape.get("batch_size", self.recipe.training.batch_size)
        sizes = {"batch_size": batch_size, **{name: getattr(model, name) for name in _DIMENSIONS}}
        return {name: sizes[name] for name in self.dimensions if sizes[name] is not None}

    def usual_forms(self, shape: Shape, precision: Precision) -> Sequence[str]:
        """The one that training takes for this shape."""
        if self.name == "mlp":
            return [self.recipe.model.feed_forward]
        recipe = dataclasses.replace(self.recipe, model=self._config(shape))
        return [choose_kernels(recipe, precision, self._machine).model.attention]

    def ledger(self, case: Case) -> Ledger:
        """Forward and backward pass, or the whole step."""
        resolved = self._resolved(case)
        if case.timed == "step":
            return count_step(resolved)
        with FakeTensorMode():
            subject = self._subject(dataclasses.replace(resolved, precision=resolved.precision.on("cpu")))
            return count_passes(subject, resolved.precision.device_type)

    def subject(self, case: Case) -> Subject:
        """The module with the recipe's weights, on random tokens."""
        return self._subject(self._resolved(case), compiled=case.compiled)

    def _subject(self, resolved: ResolvedRecipe, *, compiled: bool = False) -> Subject:
        recipe, device_type = resolved.recipe, resolved.precision.device_type
        by_block = self.name in ("transformer", "block")
        state = build_train_state(resolved, compiled=compiled and by_block)
        draw = Draw(device_type, resolved.precision.weights_dtype)
        sizes = recipe.training.batch_size, recipe.model.context_length
        tokens = draw.ids(recipe.model.vocab_size, *sizes)
        if self.name == "transformer":
            return Subject(_Loss(state), (tokens, tokens), lambda: state.step(0, tokens, tokens))
        part = _PARTS[self.name](state, tokens)
        if compiled and not by_block:
            set_up_compiler()
            part.part = torch.compile(part.part, dynamic=False)  # pyright: ignore[reportAttributeAccessIssue]
        return Subject(part, (draw.normal(*sizes, recipe.model.d_model),))

    def _resolved(self, case: Case) -> ResolvedRecipe:
        model = self._config(case.shape)
        chosen = {"feed_forward" if self.name == "mlp" else "attention": case.form}
        model = dataclasses.replace(model, **chosen)  # pyright: ignore[reportArgumentType]
        training = dataclasses.replace(
            self.recipe.training, batch_size=case.shape["batch_size"], micro_batch_size=None, parallelism="ddp"
        )
        recipe = dataclasses.replace(
            self.recipe,
            model=model,
            training=training,
            optimizer=dataclasses.replace(self.recipe.optimizer.resolved, warmup_steps=self.recipe.warmup_steps),
            # One process times the whole model.
            parallelism=ParallelismConfig(),
        )
        return ResolvedRecipe(choose_kernels(recipe, case.precision, self._machine), case.precision)

    def _config(self, shape: Shape) -> ModelConfig:
        model = self.recipe.model
        changes = {name: shape[name] for name in _DIMENSIONS if name in shape}
        # Widths that follow from others do so from the shape's.
        follow = {"head_dim": {"d_model", "n_heads"}, "n_kv_heads": {"n_heads"}, "d_ff": {"d_model"}}
        changes |= {name: None for name, of in follow.items() if name not in changes and of & changes.keys()}
        changes.setdefault("vocab_size", model.vocab_size or _USUAL_VOCABULARY)
        if self.name != "transformer":
            # The last block is timed: where the first ones are dense, one with experts.
            changes |= {"n_layers": model.n_dense_layers + 1, "vocab_size": _SMALL_VOCABULARY}
        return dataclasses.replace(model, **changes)


class _Loss(nn.Module):
    def __init__(self, state: TrainState) -> None:
        super().__init__()
        self.model, self.autocast = state.model, state.precision.autocast

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self.autocast():
            return self.model.loss(tokens, targets)


class _Part(nn.Module):
    """The last block of a model, or a part of it."""

    def __init__(self, state: TrainState, tokens: Tensor) -> None:
        super().__init__()
        self.part: nn.Module = self.part_of(state.model)
        # Kept outside of this module's own submodules: only the part's parameters are its own.
        self.rest, self.autocast = [state.model], state.precision.autocast
        self.tokens = tokens

    def part_of(self, model: Transformer) -> nn.Module:
        return model.blocks[-1]

    def forward(self, x: Tensor) -> Tensor:
        with self.autocast():
            return self.rest[0].through([self.part], x, self.tokens)


class _Attention(_Part):
    def part_of(self, model: Transformer) -> nn.Module:
        block = model.blocks[-1]
        attention = block.get_submodule("attention")
        length = model.config.context_length
        mask = attention.attend.prepare(model.positions, length, None, model.embedding.weight.device)  # pyright: ignore
        # A step makes them once for all layers.
        self.context = ForwardContext(model.positions.rotation(length), mask)
        return attention

    def forward(self, x: Tensor) -> Tensor:
        with self.autocast():
            return self.part(x, self.context)


class _FeedForward(_Part):
    def part_of(self, model: Transformer) -> nn.Module:
        return model.blocks[-1].get_submodule("feed_forward")

    def forward(self, x: Tensor) -> Tensor:
        with self.autocast():
            return self.part(x)


_PARTS = {"block": _Part, "self-attention": _Attention, "mlp": _FeedForward}
