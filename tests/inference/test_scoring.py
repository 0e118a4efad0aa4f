import dataclasses

import pytest
import torch

from napkin.errors import NapkinError
from napkin.inference.scoring import score
from napkin.model.transformer import Transformer
from oracles.model_switches import config_of, disturbed

SHARED = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
PAIRS = [
    (SHARED, [8, 9, 7]),
    (SHARED, [8, 9, 3, 2]),
    ([7], [7, 7]),
    (SHARED[:4], SHARED[4:]),
    ([*SHARED, 8], [9]),
    ([2, 7, 1, 8], [2, 8]),
    (SHARED, []),
    ([2, 7, 1, 8], [2, 8]),
]


def alone(model: Transformer, context: list[int], continuation: list[int]) -> tuple[list[float], bool]:
    tokens = torch.tensor([[*context, *continuation]])[:, -model.config.context_length - 1 :]
    n = len(continuation)
    logits = model(tokens[:, :-1])[0, tokens.shape[1] - 1 - n :]
    targets = tokens[0, tokens.shape[1] - n :]
    logprobs = logits.log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]
    return logprobs.tolist(), torch.equal(logits.argmax(dim=-1), targets)


@pytest.mark.sampled(every=6)
@torch.no_grad()
@pytest.mark.parametrize("branch_tokens", [1024, 6, 1])
@pytest.mark.parametrize("switch", ["default", "window", "positions_alibi", "positions_learned", "experts_shared"])
def test_scores_equal_those_of_each_pair_alone(switch: str, branch_tokens: int) -> None:
    model = disturbed(config_of(switch)).eval()
    pairs = [*PAIRS, (SHARED * 3, [1, 2, 3]), (SHARED * 3, [1, 2, 4])]
    # One that the model would give.
    greedy = int(model(torch.tensor([SHARED]))[0, -1].argmax())
    pairs.append((SHARED, [greedy]))
    for pair, found in zip(pairs, score(model, pairs, chunk_size=4, branch_tokens=branch_tokens), strict=True):
        logprobs, is_greedy = alone(model, *pair)
        assert found.logprobs == pytest.approx(logprobs, rel=1e-4, abs=1e-4)
        assert found.greedy == is_greedy
        assert found.total == sum(found.logprobs)
    assert score(model, [(SHARED, [greedy])])[0].greedy


def test_a_shared_beginning_goes_through_the_model_once() -> None:
    model = disturbed(config_of("default")).eval()
    seen = []
    model.embedding.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].numel()))
    score(model, [(SHARED, [8, 9, last]) for last in range(4)])
    # The last token of the context predicts, then 8 and 9; the last ones are predicted and not read.
    assert seen == [len(SHARED) - 1, 3]


def test_a_model_in_training_is_scored_without_dropout_and_left_in_training() -> None:
    config = dataclasses.replace(config_of("default"), dropout=0.5)
    model, evaluated = disturbed(config).train(), disturbed(config).eval()
    assert score(model, PAIRS) == score(evaluated, PAIRS)
    assert model.training
    assert not evaluated.training


def test_pairs_that_have_no_probability_are_refused() -> None:
    model = disturbed(config_of("default")).eval()
    with pytest.raises(NapkinError, match="pair 1 has no context"):
        score(model, [([1], [2]), ([], [2])])
    with pytest.raises(NapkinError, match=r"continuation.*pair 0.*17.*context_length 16"):
        score(model, [([1], [2] * 17)])
    assert score(model, []) == []
