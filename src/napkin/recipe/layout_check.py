"""What a layout cannot divide, refused before anything starts: sizes that do not divide, and options of a model or a
run that no rank could compute its part of."""

from napkin.accounting.pipeline_schedules import micro_batches_per_round
from napkin.errors import NapkinError
from napkin.recipe.layout import Layout
from napkin.recipe.recipe import Recipe


def refuse_impossible_layout(recipe: Recipe, layout: Layout) -> None:
    """Raise NapkinError, with the way out, where the ranks of a layout cannot train a recipe."""
    if layout.tensor > 1:
        _refuse_tensor(recipe, layout)
    if layout.pipeline > 1:
        _refuse_pipeline(recipe, layout)
    if layout.context > 1:
        _refuse_context(recipe, layout)
    if layout.expert > 1:
        _refuse_expert(recipe, layout)
    if layout.shard_optimizer:
        _refuse_sharded_optimizer(recipe, layout)


def _refuse_tensor(recipe: Recipe, layout: Layout) -> None:
    model, tensor = recipe.model, layout.tensor
    sizes = {"n_heads": model.n_heads, "n_kv_heads": model.resolved_n_kv_heads}
    if not model.n_experts or model.n_dense_layers:
        sizes["d_ff"] = model.resolved_d_ff
    if model.resolved_d_expert is not None:
        sizes["d_expert"] = model.resolved_d_expert
    for what, number in sizes.items():
        if number % tensor:
            raise NapkinError(
                f"parallelism.tensor {tensor} does not divide model.{what} {number}: use a divisor of it, or another "
                f"--model.{what.replace('_', '-')}"
            )
    if model.context_length % tensor:
        raise NapkinError(
            f"parallelism.tensor {tensor} does not divide model.context_length {model.context_length}: outside of "
            "matrices its ranks split the sequence, use a divisor of it"
        )
    if model.vocab_size and -(-model.vocab_size // tensor) * (tensor - 1) >= model.vocab_size:
        raise NapkinError(
            f"parallelism.tensor {tensor} leaves a rank without any of model.vocab_size {model.vocab_size}: use fewer "
            "ranks in --parallelism.tensor"
        )
    for reason, way_out, cannot in _cannot_split_tensors(recipe, layout):
        if cannot:
            raise NapkinError(f"parallelism.tensor {tensor} and {reason}: use {way_out}, or --parallelism.tensor 1")


def _cannot_split_tensors(recipe: Recipe, layout: Layout) -> list[tuple[str, str, bool]]:
    """What does not work together with tensor parallelism, why, the way out, and whether the recipe asks for it."""
    model, training, tensor = recipe.model, recipe.training, layout.tensor
    return [
        (
            f"precision 'bf16-pure' with vocab_size {model.vocab_size}, of which ranks have different numbers of rows: "
            "they would round their copies of other parameters differently",
            f"a --model.vocab-size of {tensor * -(-model.vocab_size // tensor)}, --training.precision bf16",
            training.precision == "bf16-pure" and model.vocab_size % tensor > 0,
        ),
        ("expert, with which it is not combined", "--parallelism.shard", layout.expert > 1),
    ]


def _refuse_pipeline(recipe: Recipe, layout: Layout) -> None:
    layout.blocks_of_stages(recipe.model.n_layers)
    training = recipe.training
    rows = training.batch_size // layout.batch_parts
    micro_batches = rows // min(training.resolved_micro_batch_size, rows or 1)
    if layout.schedule != "gpipe" and micro_batches < layout.pipeline:
        raise NapkinError(
            f"a pipeline of {layout.pipeline} ranks needs at least as many micro-batches for {layout.schedule}, there "
            f"are {micro_batches}: use a smaller --training.micro-batch-size, a larger --training.batch-size, or "
            "--parallelism.schedule gpipe"
        )
    if layout.schedule in ("interleaved-1f1b", "zb-h1"):
        micro_batches_per_round(layout.schedule, layout.pipeline, micro_batches)
    for reason, way_out, cannot in _cannot_pass_through_stages(recipe, layout):
        if cannot:
            raise NapkinError(f"parallelism.schedule {layout.schedule} and {reason}: use {way_out}")


def _cannot_pass_through_stages(recipe: Recipe, layout: Layout) -> list[tuple[str, str, bool]]:
    """What does not work together with a pipeline's schedule, why, the way out, and whether the recipe asks for it."""
    model, training = recipe.model, recipe.training
    is_v = layout.schedule == "zb-v"
    return [
        (
            f"training.recompute '{training.recompute}', which would be done twice: the schedule's backward pass is in "
            "two parts",
            "--training.recompute none, or --parallelism.schedule 1f1b",
            layout.splits_backward and training.recompute != "none",
        ),
        (
            "precision 'bf16-pure' with tied embeddings, whose two copies would be rounded differently",
            "--model.no-tie-embeddings, or --training.precision bf16",
            training.precision == "bf16-pure" and model.tie_embeddings and not is_v,
        ),
        (
            "parallelism.shard with tied embeddings, which are of two stages of one rank, each gathered by itself",
            "--model.no-tie-embeddings, or --parallelism.schedule zb-h1",
            is_v and layout.shard > 1 and model.tie_embeddings,
        ),
    ]


def _refuse_context(recipe: Recipe, layout: Layout) -> None:
    parts = 2 * layout.context * layout.tensor
    if recipe.model.context_length % parts:
        raise NapkinError(
            f"parallelism.context {layout.context} divides each sequence into {parts} parts, which "
            f"model.context_length {recipe.model.context_length} is not a multiple of: use "
            f"--model.context-length {parts * -(-recipe.model.context_length // parts)}"
        )


def _refuse_expert(recipe: Recipe, layout: Layout) -> None:
    n_experts, expert = recipe.model.n_experts, layout.expert
    if not n_experts or n_experts % expert:
        raise NapkinError(
            f"parallelism.expert {expert} does not divide model.n_experts {n_experts}: use a divisor of it, or leave "
            "it out"
        )
    if layout.shard > 1 and layout.shard % expert and recipe.training.precision == "bf16-pure":
        raise NapkinError(
            f"parallelism.expert {expert} does not divide parallelism.shard {layout.shard}: with precision 'bf16-pure' "
            "copies of an expert would be rounded differently, use a divisor of it, or --training.precision bf16"
        )


def _refuse_sharded_optimizer(recipe: Recipe, layout: Layout) -> None:
    if layout.shard > 1:
        raise NapkinError(
            f"parallelism.shard_optimizer is True, but parallelism.shard {layout.shard} divides the optimizer state "
            "already: leave it out, or use --parallelism.data in place of --parallelism.shard"
        )
    if layout.token_parts == 1:
        raise NapkinError(
            "parallelism.shard_optimizer is True, but no two ranks have the same parameters: leave it out, or use a "
            "--parallelism.data of 2 or more"
        )
    if layout.expert > 1:
        raise NapkinError(
            "parallelism.shard_optimizer is True, but the experts that parallelism.expert divides are other ones on "
            "each rank: leave one of them out"
        )
    if layout.pipeline > 1 and recipe.training.precision == "bf16-pure":
        raise NapkinError(
            "parallelism.shard_optimizer is True, but in a pipeline with precision 'bf16-pure' the copies of the "
            "embedding would be rounded differently: leave it out, or use --training.precision bf16"
        )
