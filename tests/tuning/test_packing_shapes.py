"""Micro-batches of few shapes: what a GPU's attention sees of a fine-tuning run."""

import numpy as np
import pytest
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from napkin.chats.token_sequence import Example, TokenSequence
from napkin.distributed.parallel_model import ParallelModel
from napkin.distributed.ranks import ALONE
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.recipe.layout import Layout
from napkin.tuning.packing import Packing, bucketed_width, micro_batches_of, resolved_packing, shapes_of, tokens_in_rows
from napkin.tuning.sequence_step import score_examples

STEPS, BATCH, MOST = 200, 8, 4096


def batches(n: int, size: int, longest: int, seed: int = 0) -> list[list[Example]]:
    """Lengths as of conversations: most are short, a few are as long as the context."""
    draw = np.random.default_rng(seed)
    lengths = np.clip(draw.lognormal(np.log(longest / 8), 0.9, (n, size)).astype(int), 4, longest)

    def example(length: int) -> Example:
        return (TokenSequence(draw.integers(61, size=length), np.arange(length) > length // 2),)

    return [[example(int(length)) for length in row] for row in lengths]


@pytest.mark.parametrize("max_tokens", [MOST, 2 * MOST, 1024])
def test_two_hundred_steps_have_eight_shapes_at_most(max_tokens: int) -> None:
    steps = batches(STEPS, BATCH, 2048)
    found: dict[Packing, set[tuple[int, int, bool]]] = {"packed": set(), "bucketed": set()}
    for packing, shapes in found.items():
        for examples in steps:
            settings = {"max_tokens": max_tokens, "row_length": 2048, "packing": packing}
            parts = micro_batches_of(examples, **settings)
            shapes |= {(*part.rows.inputs.shape, part.rows.documents is not None) for part in parts}
            # The plan counts what is computed, padding included.
            planned = [(each.rows, each.width) for each in shapes_of(examples, **settings)]
            assert planned == [tuple(part.rows.inputs.shape) for part in parts]
            assert sum(rows * width for rows, width in planned) == tokens_in_rows(examples, **settings)
    # Sequences longer than a micro-batch have one more length for each doubling.
    longer = {bucketed_width(length, max_tokens, 2048) for length in range(max_tokens + 1, 2049)}
    assert len(found["bucketed"]) <= 8 + len(longer)
    assert len(found["packed"]) > 100


class AttentionShapes(TorchFunctionMode):
    """The shapes of queries and masks that torch's attention is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            mask = (kwargs or {}).get("attn_mask")
            self.seen.add((tuple(args[0].shape), () if mask is None else tuple(mask.shape)))
        return function(*args, **(kwargs or {}))


def test_attention_sees_these_shapes_and_scores_are_the_same() -> None:
    model = Transformer(ModelConfig(61, context_length=64, d_model=16, n_layers=2, n_heads=2, attention="sdpa"))
    parallel_model, steps = ParallelModel(model, ALONE, Layout()), batches(20, 4, 64)
    watched = {"packed": AttentionShapes(), "bucketed": AttentionShapes()}
    for examples in steps:
        scores = []
        for packing, mode in watched.items():
            with mode:
                found = score_examples(parallel_model, examples, max_tokens=128, packing=packing)  # pyright: ignore[reportArgumentType]
            scores.append(np.concatenate([each.log_probabilities for example in found for each in example]))
        np.testing.assert_allclose(scores[0], scores[1], rtol=0, atol=2e-5)
    assert len(watched["bucketed"].seen) <= 8 < len(watched["packed"].seen)


def test_a_gpu_takes_buckets_and_a_cpu_rows_of_any_length() -> None:
    assert resolved_packing("auto", "cuda") == "bucketed"
    assert resolved_packing("auto", "cpu") == resolved_packing("packed", "cuda") == "packed"
