"""The lengths that a GPU's attention sees while an engine answers are few, and the answers are those of exact ones."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from napkin.inference.engine import Engine
from napkin.inference.requests import Request
from napkin.inference.settings import Sampling
from napkin.model.config import ModelConfig
from napkin.model.kv_cache import bucket_of
from napkin.model.transformer import Transformer


class Lengths(TorchFunctionMode):
    """Lengths of queries and keys, and whether there is a mask, of each call of torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, int, bool]] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.scaled_dot_product_attention:
            masked = (kwargs or {}).get("attn_mask") is not None
            self.seen.add((args[0].shape[2], args[1].shape[2], masked))
        return function(*args, **(kwargs or {}))


def answers(model: Transformer) -> tuple[list[list[int]], set[tuple[int, int, bool]]]:
    engine = Engine(model, max_running=3, prefill_chunk=24, block_size=4)
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(61, (n,), generator=draw).tolist() for n in (3, 17, 30, 41)]
    made = [engine.submit(Request(prompt, 40, Sampling(temperature=0.0))) for prompt in prompts]
    with Lengths() as lengths:
        engine.run()
    return [[each.token for each in completion.draws] for completion in made], lengths.seen


@pytest.mark.parametrize("window", [None, 9])
def test_answers_are_the_same_with_fewer_lengths(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(
        61, context_length=96, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, attention_window=window
    )
    model = Transformer(config, seed=3)
    exact, many = answers(model)
    for module in ("inference.engine", "inference.paged_cache"):
        monkeypatch.setattr(
            f"napkin.{module}.bucket_of", lambda length, device: bucket_of(length, torch.device("cuda"))
        )
    rounded, few = answers(model)
    assert rounded == exact
    assert len(few) <= 12 < len(many)


def test_a_cpu_pads_nothing_and_a_gpu_no_single_token() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [bucket_of(length, cpu) for length in (1, 17)] == [1, 17]
    assert [bucket_of(length, gpu) for length in (1, 2, 16, 17, 1000, 1024)] == [1, 16, 16, 32, 1024, 1024]
