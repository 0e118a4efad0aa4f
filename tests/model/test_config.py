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
    ],
)
def test_an_impossible_model_is_refused_in_one_line_that_names_the_value(sizes: dict[str, float], message: str) -> None:
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
