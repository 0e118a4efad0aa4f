"""The gradient of a batch of sequences does not depend on how it is arranged, and is that of a plain computation."""

import numpy as np
import pytest
import torch

from napkin.chats.token_sequence import Example, TokenSequence
from napkin.distributed.parallel_model import ParallelModel
from napkin.distributed.pipeline_stages import Passes
from napkin.distributed.ranks import ALONE
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.recipe.layout import Layout
from napkin.tuning.example_method import SupervisedObjective
from napkin.tuning.packing import Packing, micro_batches_of
from napkin.tuning.sequence_step import Normalisation, totals_of

CONFIG = ModelConfig(vocab_size=29, context_length=32, d_model=16, n_layers=2, n_heads=2)


def some_examples(n: int = 7) -> list[Example]:
    generator = np.random.default_rng(3)
    examples = []
    for _ in range(n):
        length = int(generator.integers(3, 20))
        loss_mask = generator.random(length) < 0.6
        loss_mask[0], loss_mask[-1] = False, True
        examples.append((TokenSequence(generator.integers(0, 29, length), loss_mask),))
    return examples


def gradient(model: Transformer, examples: list[Example], normalisation: Normalisation, **how: object) -> torch.Tensor:
    model.zero_grad()
    settings = {"max_tokens": 64, "row_length": 32, "packing": "packed", **how}
    parts = micro_batches_of(examples, **settings)  # pyright: ignore[reportArgumentType]
    totals = totals_of(parts)
    objective = SupervisedObjective(normalisation, 20.0)
    ParallelModel(model, ALONE, Layout()).gradients_of_sequences(
        [part.rows for part in parts],
        lambda number, scores: objective.loss(parts[number], scores, totals)[0],
        Passes(),
    )
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def plain_gradient(model: Transformer, examples: list[Example], normalisation: Normalisation) -> torch.Tensor:
    """One sequence at a time, by autograd over all logits."""
    model.zero_grad()
    n_tokens = sum(sequence.n_trained for (sequence,) in examples)
    for (sequence,) in examples:
        tokens = torch.from_numpy(sequence.tokens)[None]
        logprobs = model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[0, :, 0]
        total = -logprobs[torch.from_numpy(sequence.loss_mask[1:])].sum()
        divisor = {
            "token": n_tokens,
            "sequence": sequence.n_trained * len(examples),
            "constant": 20.0 * len(examples),
        }[normalisation]
        (total / divisor).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("normalisation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("packing", ["packed", "padded", "padded left"])
@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
def test_a_gradient_is_that_of_single_sequences(
    normalisation: Normalisation, packing: Packing, max_tokens: int
) -> None:
    model, examples = Transformer(CONFIG), some_examples()
    found = gradient(model, examples, normalisation, packing=packing, max_tokens=max_tokens)
    expected = plain_gradient(model, examples, normalisation)
    assert float((found - expected).norm() / expected.norm()) < 1e-6


def test_the_order_of_units_and_empty_micro_batches_do_not_matter() -> None:
    model, examples = Transformer(CONFIG), some_examples()
    one = gradient(model, examples, "token")
    other = gradient(model, examples[::-1], "token", at_least=9)
    assert float((one - other).norm() / one.norm()) < 1e-6


def test_short_sequences_fill_the_rows_of_longer_ones() -> None:
    # Inputs of 10, 7, 6, 4, 3 tokens: three rows of 10, and what is left of two is taken.
    examples: list[Example] = [(TokenSequence(np.arange(n + 1), np.arange(n + 1) > 0),) for n in (3, 10, 6, 7, 4)]
    (part,) = micro_batches_of(examples, max_tokens=30, row_length=32)
    assert tuple(part.rows.inputs.shape) == (3, 10)
    assert part.rows.documents is not None
    # An example that does not fit is in the next micro-batch, and shorter ones still go to the first.
    first, second = micro_batches_of(examples, max_tokens=20, row_length=32)
    assert (first.example_numbers, second.example_numbers) == ((1, 3, 0), (2, 4))
    assert tuple(second.rows.inputs.shape) == (2, 6)
    # Of one length, each has its row and none a mask.
    (alike,) = micro_batches_of(examples[1:2] * 4, max_tokens=40, row_length=32)
    assert alike.rows.documents is None
    assert [len(each.rows.inputs) for each in micro_batches_of(examples[1:2] * 4, max_tokens=39, row_length=32)] == [
        3,
        1,
    ]
