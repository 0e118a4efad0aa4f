from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.optim.base import decay_groups

CONFIG = ModelConfig(vocab_size=10, context_length=8, d_model=8, n_layers=2, n_heads=2)


def test_matrices_decay_and_gains_do_not() -> None:
    model = Transformer(CONFIG)
    matrices, vectors = decay_groups(model, 0.1)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all(names[id(p)].endswith("weight") for p in matrices["params"])
    assert all(names[id(p)].endswith("gain") for p in vectors["params"])
    assert len(matrices["params"]) + len(vectors["params"]) == len(names)


def test_a_tied_matrix_is_listed_once() -> None:
    model = Transformer(CONFIG)
    assert model.head_weight is model.embedding.weight
    listed = [p for group in decay_groups(model, 0.1) for p in group["params"]]
    assert sum(p is model.embedding.weight for p in listed) == 1


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    model = Transformer(CONFIG)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "norm.gain")
    (group,) = decay_groups(model, 0.1)
    assert group["weight_decay"] == 0
    assert [id(p) for p in group["params"]] == [id(model.norm.gain)]
