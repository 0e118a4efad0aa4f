import dataclasses

import pytest

from napkin.errors import NapkinError
from napkin.model.config import ModelConfig


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"n_layers": -1}, "n_layers is -1"),
        ({"n_heads": 0}, "n_heads is 0"),
        ({"n_kv_heads": 0}, "n_kv_heads is 0"),
        ({"d_ff": 0}, "d_ff is 0"),
        ({"norm_eps": float("nan")}, "norm_eps is nan"),
        ({"d_model": 250}, "use d_model 252"),
        ({"d_model": 12, "n_heads": 4}, "heads of 3.*use d_model 16"),
        ({"n_kv_heads": 3}, "n_heads 4 does not divide into n_kv_heads 3"),
        ({"n_kv_heads": 8}, "n_heads 4 does not divide into n_kv_heads 8"),
        ({"head_dim": 7}, "head_dim is 7, rotary positions need an even number: use 8"),
        ({"d_model": 33, "n_heads": 3, "positions": "sinusoidal"}, "use 34"),
        ({"positions": "alibi", "rope_scaling": "yarn"}, "rope_scaling is 'yarn' and positions are 'alibi'"),
        ({"rope_scaling": "linear"}, "rope_factor is 1.0: use a scaling with a factor above 1"),
        ({"norm": "none", "qk_norm": "head"}, "qk_norm is 'head' and norm is 'none'"),
        ({"rope_factor": 2.0}, "rope_scaling is 'none' and rope_factor is 2.0"),
        ({"rope_scaling": "linear", "rope_factor": 0.5}, "rope_factor is 0.5: use 1 or more"),
        ({"rope_scaling": "ntk", "rope_factor": 2.0, "head_dim": 2}, "use 'linear'"),
        ({"attention_softcap": 50.0, "attention": "sdpa"}, "use attention 'plain', 'flex', 'flash' or 'compiled'"),
        ({"attention": "flash", "positions": "alibi"}, "does not add: use attention 'flex'"),
        ({"attention": "compiled", "positions": "alibi"}, "'compiled' does not add: use attention 'flex'"),
        ({"attention": "flash", "head_dim": 320}, "320 wide, the limit is 256"),
        ({"attention_window": 0}, "attention_window is 0"),
        ({"full_attention_every": 2}, "set attention_window too"),
        ({"full_attention_every": 1, "attention_window": 4}, "leave attention_window out"),
        ({"logit_softcap": float("inf")}, "logit_softcap is infinite"),
        ({"dropout": 1.0}, "dropout is 1.0: use less than 1"),
        ({"dropout": -0.1}, "dropout is -0.1: use 0 or more"),
        ({"n_experts": 2, "experts_per_token": 3}, "experts_per_token 3 exceeds n_experts 2"),
        ({"n_shared_experts": 1}, "n_shared_experts is 1 and there are no experts"),
        ({"d_expert": 96}, "d_expert is 96 and there are no experts"),
        ({"expert_capacity": 1.25}, "expert_capacity is 1.25 and there are no experts"),
        ({"rope_original_context": 128}, "rope_original_context is 128 and rope_scaling is 'none'"),
        ({"n_dense_layers": 1}, "n_dense_layers is 1 and there are no experts"),
        ({"n_experts": 2, "n_dense_layers": 4}, "leaves none of n_layers 4 to the experts: use at most 3"),
        ({"n_experts": 2, "biases": "all"}, "experts have no biases"),
        ({"n_experts": 2, "mup_base_d_model": 64}, "experts have no multipliers"),
    ],
)
def test_an_impossible_model_is_refused_in_one_line_that_names_the_value(
    sizes: dict[str, float | str], message: str
) -> None:
    with pytest.raises(NapkinError, match=message) as caught:
        ModelConfig(**sizes)  # pyright: ignore[reportArgumentType]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("d_model", "d_ff"), [(256, 704), (384, 1024), (768, 2048), (4096, 10944), (12, 32)])
def test_default_d_ff_is_the_first_multiple_of_32_from_8_thirds_of_d_model(d_model: int, d_ff: int) -> None:
    assert ModelConfig(d_model=d_model, n_heads=2).resolved_d_ff == d_ff
    assert 3 * (d_ff - 32) < 8 * d_model <= 3 * d_ff


def test_a_changed_copy_resolves_its_defaults_anew() -> None:
    wider = dataclasses.replace(ModelConfig(), d_model=512, n_heads=8)
    assert (wider.resolved_n_kv_heads, wider.resolved_d_ff, wider.resolved_head_dim) == (8, 1376, 64)
