"""One batch has one gradient: on 1, 2 and 4 ranks, by DDP and FSDP, in any micro-batches, padded on either side."""

import dataclasses
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from napkin.chats.token_sequence import Example, TokenSequence
from napkin.distributed.ranks import ALONE
from napkin.errors import NapkinError
from napkin.model.transformer import Transformer, add_scalar_head
from napkin.recipe.layout import Layout
from napkin.tuning.sequence_step import (
    SequenceScores,
    numbers_of_rank,
    refuse_divided_models,
    score_examples,
    train_on_examples,
)
from oracles.alignment_cases import CASES, WITH_SCALAR_HEAD, gradient_of, some_examples, train_state_of
from reliability.ranks import run_script_of_ranks
from tuning.rank_gradients import sizes_of, weights_after_reinforcement


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Of two gradients, by the norm of one."""
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.torture)])
def test_ranks_have_the_gradient_of_one_process(tmp_path: Path, server: subprocess.Popen[str], size: int) -> None:
    run_script_of_ranks(Path(__file__).with_name("rank_gradients.py"), server, tmp_path, size)
    train_state, with_scalar_head = train_state_of(), train_state_of(scalar_head=True)
    alone = {
        name: gradient_of(with_scalar_head if name in WITH_SCALAR_HEAD else train_state, make()[1], make()[0])
        for name, make in CASES.items()
    }
    gradients = load_file(tmp_path / "gradients.safetensors")
    metrics = json.loads((tmp_path / "figures.json").read_text())
    for name, (expected, step) in alone.items():
        for strategy in ("ddp", "fsdp"):
            for max_tokens in sizes_of(name):
                key = f"{name}, {strategy}, {max_tokens}"
                assert distance(gradients[key], expected) < 1e-6, key
                told = metrics[key]
                # Sums of both signs, and rewards, which are differences, may be small beside what they are of.
                assert told["loss"] == pytest.approx(step.loss, rel=1e-6, abs=1e-6)
                assert told["gradient_norm"] == pytest.approx(step.gradient_norm, rel=1e-6)
                assert told["totals"] == dataclasses.asdict(step.totals)
                assert told["metrics"] == pytest.approx(step.metrics, rel=1e-6, abs=1e-6)
    examples = some_examples()
    scores = score_examples(train_state.parallel_model, examples, max_tokens=64)
    expected = torch.cat([torch.from_numpy(each.log_probabilities) for example in scores for each in example])
    for strategy in ("ddp", "fsdp"):
        assert distance(gradients[f"scores, {strategy}"], expected) < 1e-6
        of_one, _ = gradient_of(train_state, examples[:1], CASES["supervised, token"]()[0])
        assert distance(gradients[f"one example, {strategy}"], of_one) < 1e-6
    # Which update learns from which prompt's answers does not depend on whose prompts they are.
    start, reinforced = (weights_after_reinforcement(ALONE, range(4), updates=n) for n in (1, 2))
    assert distance(start, reinforced) > 1e-3
    assert distance(gradients["reinforcement"], reinforced) < 1e-5


def test_scores_are_those_of_all_logits() -> None:
    train_state = train_state_of()
    model = train_state.model
    add_scalar_head(model)
    assert model.scalar_head is not None
    torch.nn.init.normal_(model.scalar_head.weight)
    examples = some_examples(5, size=2)
    with torch.no_grad():
        for packing in ("packed", "padded", "padded left"):
            found = score_examples(
                train_state.parallel_model, examples, max_tokens=50, packing=packing, temperature=0.7
            )
            for example, scored in zip(examples, found, strict=True):
                for sequence, scores in zip(example, scored, strict=True):
                    assert_scores(model, sequence, scores, 0.7)
    assert model.training


def assert_scores(model: Transformer, sequence: TokenSequence, scores: SequenceScores, temperature: float) -> None:
    """Scores are those of the sequence alone, from all its logits."""
    tokens = torch.from_numpy(sequence.tokens)
    logprobs = (model(tokens[None, :-1])[0].double() / temperature).log_softmax(-1)[sequence.loss_mask[1:]]
    targets = tokens[torch.from_numpy(sequence.loss_mask)]
    np.testing.assert_allclose(scores.log_probabilities, logprobs.gather(1, targets[:, None])[:, 0], atol=1e-5)
    np.testing.assert_allclose(scores.entropies, -(logprobs.exp() * logprobs).sum(1), atol=1e-5)
    assert scores.scalars is not None
    assert model.scalar_head is not None
    scalars = model.scalar_head(model.hidden(tokens[None, :-1])[0])[sequence.loss_mask[1:], 0]
    np.testing.assert_allclose(scores.scalars, scalars.numpy(), atol=1e-5)


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_units_are_divided_evenly_and_each_goes_to_one_rank(parts: int) -> None:
    examples, layout = some_examples(40), Layout(data=parts)
    own = [numbers_of_rank(examples, layout, rank) for rank in range(parts)]
    assert sorted(number for numbers in own for number in numbers) == list(range(40))
    loads = [sum(len(each.tokens) for number in numbers for each in examples[number]) for numbers in own]
    assert max(loads) - min(loads) <= max(len(example[0].tokens) for example in examples)


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(pipeline=2), Layout(context=2), Layout(data=2, expert=2)])
def test_a_layout_that_divides_the_model_is_refused(layout: Layout) -> None:
    with pytest.raises(NapkinError, match=r"parallelism.(tensor|pipeline|context|expert).*2: leave.*1"):
        refuse_divided_models(layout)


def test_a_batch_without_a_trained_token_is_refused() -> None:
    examples: list[Example] = [(TokenSequence(np.arange(5), np.zeros(5, dtype=bool)),)]
    with pytest.raises(NapkinError, match=r"5 tokens.*1.*trained on"):
        train_on_examples(train_state_of(), 0, examples, CASES["supervised, token"]()[0], max_tokens=64)
