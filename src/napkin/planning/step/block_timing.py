"""The fastest forms of a training step's blocks on this machine: plain or compiled kernels, and which attention.

Blocks are timed as they run, forward and backward, so that each operator finds the caches as its neighbours leave them:
alone, with its operands in cache, another form is often the fastest. The blocks are those of the recipe, except that
their width and the number of tokens are bounded: a recipe is timed once, in about two seconds, and its choice is kept.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import torch

from napkin.hardware.form_timing import choose_form
from napkin.kernels.attention.by_tiles import MULTIPLE, multiplies_pairs
from napkin.kernels.loss.cross_entropy import CHUNK_SIZE, HEAD, MOST_WORDS, class_of_head, linear_cross_entropy
from napkin.kernels.operator_forms import ShapeClass, pinned_forms
from napkin.model.config import ModelConfig
from napkin.model.config_checks import mixer_pattern
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import ParallelismConfig
from napkin.tensors import random_state_kept
from napkin.train_step.step import build_train_state

MOST_WIDTH = 256
"""The widest residual stream that is timed: of a wider model some of its heads, and as large a part of its layers."""
MOST_NUMBERS = 2**18
"""Numbers of the residual stream that are timed, unless one sequence has more."""
LONGEST = 2048
"""The longest sequence that is timed: longer ones take the form that is fastest at this length."""


def fastest_blocks(
    recipes: Sequence[Recipe], precision: Precision, progress: Callable[[str], None] = lambda doing: None
) -> Recipe:
    """The recipe whose blocks are fastest; they differ in `training.kernels` and `model.attention`, and the first one
    stays unless another is surely faster."""
    if len(recipes) == 1:
        return recipes[0]
    by_name = {f"{recipe.training.kernels} {recipe.model.attention}": recipe for recipe in recipes}
    narrow = {name: narrowed(recipe) for name, recipe in by_name.items()}
    default = next(iter(by_name))

    def make_forms() -> dict[str, Callable[[], object]]:
        progress("timing forms of the blocks, once")
        with random_state_kept("cpu"):
            return {name: passes_of_blocks(each, precision) for name, each in narrow.items()}

    form = choose_form("blocks", shape_class_of(list(narrow.values()), precision), make_forms, default=default)
    return by_name[form]


def time_head(model: ModelConfig, progress: Callable[[str], None] = lambda doing: None) -> None:
    """Time the forms of the head of a model in bf16 without a gradient, which evaluations multiply, and keep the
    fastest: only on a processor that may have two forms."""
    if not multiplies_pairs() or model.d_model % MULTIPLE:
        return
    n_words = min(model.vocab_size, MOST_WORDS)

    def make_forms() -> dict[str, Callable[[], object]]:
        progress("timing forms of the head, once")
        with random_state_kept("cpu"):
            hidden, weight = (torch.randn(n, model.d_model).bfloat16() for n in (CHUNK_SIZE, n_words))
        targets = torch.zeros(CHUNK_SIZE, dtype=torch.int64)

        def evaluate(form: str) -> None:
            with pinned_forms({HEAD: form}):
                linear_cross_entropy(hidden, weight, targets, compiled=True)

        return {form: partial(evaluate, form) for form in ("tiles", "chunks")}

    choose_form(HEAD, class_of_head(CHUNK_SIZE, model.d_model, n_words), make_forms, default="tiles")


def narrowed(recipe: Recipe) -> Recipe:
    """The recipe of the blocks that are timed in place of a recipe's own."""
    model = recipe.model
    length = min(model.context_length, LONGEST)
    changes = {"context_length": length, "vocab_size": 16}
    # Layers with experts come after the dense ones, and each token mixer once in its pattern.
    changes["n_layers"] = min(max(1, model.n_dense_layers + 1, len(mixer_pattern(model.mixers))), model.n_layers)
    if model.d_model > MOST_WIDTH and model.kv_lora_rank is None:
        changes |= _narrower(model)
    model = dataclasses.replace(model, **changes)
    size = max(1, MOST_NUMBERS // (length * model.d_model))
    size = min(size, recipe.training.resolved_micro_batch_size)
    training = dataclasses.replace(recipe.training, batch_size=size, micro_batch_size=size, recompute_every=1)
    return dataclasses.replace(recipe, model=model, training=training, parallelism=ParallelismConfig())


def _narrower(model: ModelConfig) -> dict[str, int]:
    """The widths of a model with fewer heads of the same kind."""
    group = model.n_heads // model.resolved_n_kv_heads
    n_kv_heads = max(1, model.resolved_n_kv_heads * MOST_WIDTH // model.d_model)
    share = n_kv_heads / model.resolved_n_kv_heads

    def part(size: int) -> int:
        return max(64, round(share * size / 64) * 64)

    changes = {"n_heads": group * n_kv_heads, "n_kv_heads": n_kv_heads, "head_dim": model.resolved_head_dim}
    changes["d_model"] = part(model.d_model)
    if model.resolved_d_ff:
        changes["d_ff"] = part(model.resolved_d_ff)
    if model.d_expert is not None:
        changes["d_expert"] = part(model.d_expert)
    return changes


def shape_class_of(recipes: Sequence[Recipe], precision: Precision) -> ShapeClass:
    """All that decides which of the narrowed recipes' blocks are fastest: their format, the tokens of a batch, fields
    of the model that are not the default, and what all of the recipes have in common."""
    first, usual = recipes[0], ModelConfig()
    left_out = {"vocab_size", "n_layers", "context_length", "attention"}
    shown = [
        f"{name} {value}"
        for name, value in dataclasses.asdict(first.model).items()
        if name not in left_out and value != getattr(usual, name)
    ]
    if first.data.separate_documents:
        shown.append("documents")
    for name, values in (
        ("kernels", {each.training.kernels for each in recipes}),
        ("attention", {each.model.attention for each in recipes}),
    ):
        if len(values) == 1:
            shown.append(f"{name} {values.pop()}")
    return (precision.name, f"{first.training.batch_size} × {first.model.context_length} tokens", *shown)


def passes_of_blocks(recipe: Recipe, precision: Precision) -> Callable[[], object]:
    """The forward and the backward pass of a recipe's blocks, on a batch of random numbers."""
    state = build_train_state(ResolvedRecipe(recipe, precision))
    model, shape = state.model, (recipe.training.batch_size, recipe.model.context_length)
    tokens = torch.zeros(shape, dtype=torch.int64)
    documents = torch.zeros_like(tokens) if recipe.data.separate_documents else None
    x = torch.randn(*shape, recipe.model.d_model, dtype=precision.weights_dtype, requires_grad=True)
    upstream = torch.randn_like(x)

    def passes() -> None:
        with precision.autocast():
            mixed = model.through(model.blocks, x, tokens, documents)
        torch.autograd.backward(mixed, upstream)

    return passes
