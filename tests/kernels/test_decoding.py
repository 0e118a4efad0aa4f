import pytest
import torch
import torch.nn.functional as F

from napkin.accounting.recording import record
from napkin.kernels.attention.decode import Slots, attend_to_slots, attend_to_slots_reference
from napkin.kernels.products.linear import FEW_VECTORS, linear, multiply_vectors
from napkin.model.config import ModelConfig
from napkin.model.kv_cache import ContiguousCache
from napkin.model.transformer import Transformer


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@torch.inference_mode()
@pytest.mark.parametrize(("n_rows", "n_columns"), [(1031, 256), (299, 992)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_bf16_matrix_times_a_vector_is_rounded_once(n_rows: int, n_columns: int, bias: bool) -> None:
    weight, x, b = randn(n_rows, n_columns), randn(1, 1, n_columns, seed=1), randn(n_rows, seed=2) if bias else None
    exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
    found = linear(x, weight, b)
    assert found.dtype == torch.bfloat16
    # Half a unit in the last of 8 bits, relative to the smallest number that has them, and the fp32 sum's own rounding.
    assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() * 1.001 + 1e-4).all()


@torch.inference_mode()
@pytest.mark.parametrize("n_columns", [512, 1024, 1056, 3072, 4128])
def test_a_vector_has_the_same_product_whatever_the_width_and_the_number_of_others(n_columns: int) -> None:
    weight, x = randn(533, n_columns), randn(21, n_columns, seed=1)
    alone = torch.cat([multiply_vectors(row[None], weight, None) for row in x])
    exact = x.double() @ weight.double().T
    assert ((alone.double() - exact).abs() <= 2**-8 * exact.abs() * 1.001 + 1e-3).all()
    for n in range(2, len(x) + 1):
        assert torch.equal(multiply_vectors(x[:n], weight, None), alone[:n])


@torch.inference_mode()
def test_a_vector_has_the_same_product_alone_and_beside_others() -> None:
    weight, x, bias = randn(1030, 512), randn(2, 4, 512, seed=1), randn(1030, seed=2)
    found = linear(x, weight, bias)
    assert torch.equal(found.flatten(0, 1), torch.cat([linear(each, weight, bias) for each in x.view(8, 1, 512)]))
    torch.testing.assert_close(found, F.linear(x.double(), weight.double(), bias.double()).bfloat16())


@torch.inference_mode()
def test_a_large_matrix_gives_the_same_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = randn(16411, 512), randn(1, 512, seed=1)
    alone = linear(x, weight)
    for n_threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=n_threads: n)
        assert torch.equal(linear(x, weight), alone)


@torch.inference_mode()
def test_a_product_that_is_metered_is_the_same_and_counted() -> None:
    weight, x, bias = randn(700, 512), randn(1, 1, 512, seed=1), randn(700, seed=2)
    alone, found = linear(x, weight, bias), []
    ledger = record(torch.nn.Identity(), lambda: found.append(linear(x, weight, bias)), warm_up=0)
    assert torch.equal(found[0], alone)
    assert ledger.flops == 2 * 700 * 512
    assert not ledger.unknown_operators


@torch.inference_mode()
def test_other_products_are_those_of_torch() -> None:
    for x, weight in [
        (randn(FEW_VECTORS[-1] + 1, 512), randn(512, 512)),
        (randn(1, 8), randn(8, 8)),
        (randn(1, 1001), randn(300, 1001)),
        (randn(1, 512), randn(512, 1024)[:, ::2]),
    ]:
        assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert torch.equal(
        linear(randn(1, 512).float(), randn(512, 512).float()),
        F.linear(*(randn(1, 512).float(), randn(512, 512).float())),
    )


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("n_kv_heads", [6, 2])
def test_attention_to_slots_in_int8_equals_the_formula(softcap: float | None, n_kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (9, n_kv_heads, 16, 40)
    keys, values = (torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator) for _ in range(2))
    scales = tuple(randn(9, n_kv_heads, 16, 1, seed=seed).abs() / 40 for seed in (3, 4))
    table = torch.tensor([[7, 2, 4], [5, 0, 0], [3, 0, 0]])
    slots = Slots(torch.tensor([40, 1, 16]), table, 40, (scales[0], scales[1]))
    arguments = randn(3, 6, 1, 40, seed=2), keys, values, slots, 0.3, softcap
    torch.testing.assert_close(
        attend_to_slots(*arguments), attend_to_slots_reference(*arguments), rtol=2**-8, atol=1e-4
    )


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("n_kv_heads", [6, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_to_slots_of_blocks_equals_the_formula(
    softcap: float | None, n_kv_heads: int, dtype: torch.dtype
) -> None:
    pool_of_keys, pool_of_values = (
        x.to(dtype) for x in (3 * randn(9, n_kv_heads, 16, 40), randn(9, n_kv_heads, 16, 40, seed=1))
    )
    slots = Slots(torch.tensor([40, 1, 16]), torch.tensor([[7, 2, 4], [5, 0, 0], [3, 0, 0]]), 40)
    arguments = randn(3, 6, 1, 40, seed=2).to(dtype), pool_of_keys, pool_of_values, slots, 0.3, softcap
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        attend_to_slots(*arguments), attend_to_slots_reference(*arguments), rtol=rounding, atol=1e-5
    )


def test_attention_to_slots_is_the_same_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences enough for several threads; and a meter that watches sees the operator, with torch's FLOPs."""
    keys, values = (randn(21, 4, 16, 64, seed=seed).float() for seed in (1, 2))
    counts = torch.tensor([1 + 5 * each % 47 for each in range(20)])
    slots = Slots(counts, torch.arange(60).reshape(20, 3) % 21, 47)
    arguments = randn(20, 8, 1, 64).float(), keys, values, slots, 0.3
    alone = attend_to_slots(*arguments)
    for n_threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=n_threads: n)
        assert torch.equal(attend_to_slots(*arguments), alone)
    ledger = record(torch.nn.Identity(), lambda: attend_to_slots(*arguments), warm_up=0)
    assert ledger.flops == 4 * 20 * 8 * 47 * 64


@pytest.mark.parametrize("window", [None, 6])
def test_a_model_decodes_compiled_as_it_does_by_torch(window: int | None) -> None:
    config = ModelConfig(
        vocab_size=700, context_length=32, d_model=512, n_layers=2, n_heads=8, n_kv_heads=4, attention_window=window
    )
    model = Transformer(config, dtype=torch.bfloat16).eval()
    tokens = torch.randint(700, (3, 20), generator=torch.Generator().manual_seed(0))

    def logits() -> torch.Tensor:
        cache = ContiguousCache(config, 3, 32, dtype=torch.bfloat16)
        model.hidden(tokens[:, :12], cache=cache.extend(12, [12, 5, 9]))
        parts = []
        for i in range(12, 20):
            hidden = model.hidden(tokens[:, i : i + 1], cache=cache.extend(1, [1, 1, i % 2]))
            parts.append(hidden[: 2 + i % 2])
        alone = ContiguousCache(config, 1, 32, dtype=torch.bfloat16)
        model.hidden(tokens[:1, :12], cache=alone.extend(12))
        parts += [model.hidden(tokens[:1, i : i + 1], cache=alone.extend(1)) for i in range(12, 20)]
        return model.logits_of(torch.cat([part.flatten(0, 1) for part in parts])).float()

    with torch.inference_mode():
        compiled = logits()
    with torch.no_grad():
        plain = logits()
    assert (compiled - plain).norm() < 0.02 * plain.norm()
