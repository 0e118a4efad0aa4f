"""The sizes of a recipe that the rules of thumb take, and its parameters and FLOPs by the best of them."""

from napkin.accounting.rules import Sizes, attention_flops_rule, layered_parameters_rule, training_flops_rule
from napkin.model.config import ModelConfig
from napkin.recipe.recipe import Recipe


def sizes_of(recipe: Recipe) -> Sizes:
    """The sizes of a resolved recipe of one device."""
    model, training = recipe.model, recipe.training
    return Sizes(
        vocab_size=model.vocab_size,
        d_model=model.d_model,
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        n_kv_heads=model.resolved_n_kv_heads,
        head_dim=model.resolved_head_dim,
        d_ff=model.resolved_d_ff,
        tied=model.tie_embeddings,
        gated=model.gated,
        batch_size=training.resolved_micro_batch_size,
        sequences=training.batch_size,
        context_length=model.context_length,
        by_layers=parameters_by_rule(model),
        formula=parameters_formula(model),
        multiplying=multiplying_parameters_by_rule(model),
    )


def parameters_by_rule(model: ModelConfig) -> int:
    """All parameters, those of experts and learned positions included, by `layered_parameters_rule`."""
    return _layered(model, model.n_experts + model.n_shared_experts)


def multiplying_parameters_by_rule(model: ModelConfig) -> int:
    """The parameters that a token is multiplied with: of experts those that it uses, and no table that is looked up."""
    looked_up = (0 if model.tie_embeddings else model.vocab_size) + _learned_positions(model)
    return _layered(model, model.experts_per_token + model.n_shared_experts) - looked_up * model.d_model


def step_flops_by_rule(model: ModelConfig, tokens: float) -> float:
    """6·N·T for the parameters that a token is multiplied with, and attention over all pairs."""
    attention = attention_flops_rule(
        n_layers=model.n_layers,
        d_model=model.n_heads * model.resolved_head_dim,
        context_length=model.context_length,
        tokens=tokens,
    )
    return training_flops_rule(multiplying_parameters_by_rule(model), tokens) + attention


def parameters_formula(model: ModelConfig) -> str:
    """The closed form, for this model."""
    tables = "V·d" if model.tie_embeddings else "2·V·d"
    feed_forward = "3·d·ff" if model.gated else "2·d·ff"
    if model.n_experts:
        n_experts = model.n_experts + model.n_shared_experts
        feed_forward = f"{n_experts} experts of {feed_forward.replace('ff', 'e')}"
    return f"L·(2·d·c·(h + kv) + {feed_forward}) + {tables}"


def _layered(model: ModelConfig, n_experts: int) -> int:
    return layered_parameters_rule(
        vocab_size=model.vocab_size,
        d_model=model.d_model,
        n_layers=model.n_layers,
        d_ff=model.resolved_d_ff,
        n_heads=model.n_heads,
        n_kv_heads=model.resolved_n_kv_heads,
        head_dim=model.resolved_head_dim,
        tied=model.tie_embeddings,
        gated=model.gated,
        n_experts=n_experts if model.n_experts else 0,
        n_routed=model.n_experts,
        d_expert=model.resolved_d_expert or 0,
        n_dense_layers=model.n_dense_layers,
        positions=_learned_positions(model),
    )


def _learned_positions(model: ModelConfig) -> int:
    return model.context_length if model.positions == "learned" else 0
