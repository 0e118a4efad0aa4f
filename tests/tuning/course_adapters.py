"""The functions that the checks of Stanford's CS336, assignment 5 (alignment), call, by its names and shapes, made of
napkin's. Its course page: https://cs336.stanford.edu; its checks: tests/adapters.py of the assignment."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from napkin.chats import TokenSequence, sequence_of
from napkin.data import Document, KeyedPermutation, evaluation_windows, write_token_file
from napkin.grading import chosen_letter, final_number
from napkin.kernels import entropies
from napkin.model import TokenScores, Transformer
from napkin.recipe import PreferenceConfig, ReinforcementConfig
from napkin.tokenizer import Tokenizer
from napkin.tuning import (
    BatchTotals,
    Objective,
    SequenceMicroBatch,
    SupervisedObjective,
    micro_batches_of,
    policy_objective,
    preference_objective,
)
from napkin.tuning.policy_gradient import (
    group_normalised,
    less_group_mean,
    pessimistic_terms,
    plain_terms,
    token_ratios,
)
from napkin.tuning.sequence_step import REFERENCE, sums_of_sequences, trained_tokens_of_sequences

Loss = tuple[Tensor, dict[str, Tensor]]


def run_tokenize_prompt_and_output(
    prompt_strs: list[str], output_strs: list[str], tokenizer: Tokenizer
) -> dict[str, Tensor]:
    """Tokens of prompts with their outputs in rows padded on the right, those one later, and which are the output's."""
    sequences = [
        sequence_of(tokenizer.encode(prompt), tokenizer.encode(output))
        for prompt, output in zip(prompt_strs, output_strs, strict=True)
    ]
    length = max(len(each.tokens) for each in sequences)
    tokens, mask = torch.zeros(2, len(sequences), length, dtype=torch.int64)
    for row, each in enumerate(sequences):
        tokens[row, : len(each.tokens)] = torch.from_numpy(each.tokens)
        mask[row, : len(each.tokens)] = torch.from_numpy(each.loss_mask)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "response_mask": mask[:, 1:].bool()}


def run_compute_entropy(logits: Tensor) -> Tensor:
    """Of the softmax over the last dimension."""
    return entropies(logits)


def run_get_response_log_probs(
    model: Transformer, input_ids: Tensor, labels: Tensor, return_token_entropy: bool
) -> dict[str, Tensor]:
    """Log-probabilities of all labels, and entropies."""
    scores = model.token_scores(input_ids, torch.arange(labels.numel()), labels.flatten())
    found = {"log_probs": scores.log_probabilities.view(labels.shape)}
    return found | ({"token_entropy": scores.entropies.view(labels.shape)} if return_token_entropy else {})


def run_masked_normalize(
    tensor: Tensor, mask: Tensor, dim: int | None = None, normalize_constant: float = 1.0
) -> Tensor:
    """The sum along a dimension of what the mask selects, over a constant."""
    part, terms, shape = _rows_along(tensor, mask, dim)
    return (sums_of_sequences(terms, part) / normalize_constant).view(shape)


def run_masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """The mean along a dimension of what the mask selects; nan where it is nothing."""
    part, terms, shape = _rows_along(tensor, mask, dim)
    return (sums_of_sequences(terms, part) / trained_tokens_of_sequences(part)).view(shape)


def run_sft_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    normalize_constant: float = 1.0,
) -> Loss:
    """The mean over all micro-batches' rows of the sum of -log p over a constant, and its backward pass."""
    objective = SupervisedObjective("constant", normalize_constant)
    return _train_step(objective, policy_log_probs, response_mask, gradient_accumulation_steps)


def run_compute_group_normalized_rewards(
    reward_fn: Callable[[str, str], dict[str, float]],
    rollout_responses: list[str],
    repeated_ground_truths: list[str],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Advantages and rewards of answers in groups."""
    pairs = zip(rollout_responses, repeated_ground_truths, strict=True)
    rewards = torch.tensor([reward_fn(*pair)["reward"] for pair in pairs])
    groups = rewards.view(-1, group_size)
    advantages = group_normalised(groups, epsilon=advantage_eps) if normalize_by_std else less_group_mean(groups)
    return advantages.flatten(), rewards, {"mean": rewards.mean().item()}


def run_compute_naive_policy_gradient_loss(raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor) -> Tensor:
    """-A · log p of each token."""
    advantages = raw_rewards_or_advantages.expand_as(policy_log_probs)
    return plain_terms(policy_log_probs.flatten(), advantages.flatten()).view_as(policy_log_probs)


def run_compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> Loss:
    """PPO's clipped term of each token, and where it is clipped."""
    ratios = token_ratios(policy_log_probs.flatten(), old_log_probs.flatten())
    of_tokens = advantages.expand_as(policy_log_probs).flatten()
    terms, limited = pessimistic_terms(ratios, of_tokens, low=cliprange, high=cliprange)
    return terms.view_as(policy_log_probs), {"clipped": limited.view_as(policy_log_probs)}


def run_compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: str,
    raw_rewards: Tensor,
    advantages: Tensor,
    old_log_probs: Tensor,
    cliprange: float,
) -> Loss:
    """One of three terms."""
    if loss_type == "grpo_clip":
        return run_compute_grpo_clip_loss(advantages, policy_log_probs, old_log_probs, cliprange)
    weights = raw_rewards if loss_type == "no_baseline" else advantages
    return run_compute_naive_policy_gradient_loss(weights, policy_log_probs), {}


def run_grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: str,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> Loss:
    """The mean over all micro-batches' rows of the mean of their tokens' terms, and its backward pass."""
    algorithm = "grpo" if loss_type == "grpo_clip" else "reinforce"
    objective = policy_objective(
        ReinforcementConfig(algorithm=algorithm, normalisation="sequence", clip_low=cliprange, clip_high=cliprange)
    )
    weights = raw_rewards if loss_type == "no_baseline" else advantages
    assert weights is not None
    values = {"advantages": weights.expand_as(policy_log_probs)}
    if old_log_probs is not None:
        values["old_log_probabilities"] = old_log_probs
    return _train_step(objective, policy_log_probs, response_mask, gradient_accumulation_steps, **values)


def run_compute_per_instance_dpo_loss(
    lm: Transformer,
    lm_ref: Transformer,
    tokenizer: Tokenizer,
    beta: float,
    prompt: str,
    response_chosen: str,
    response_rejected: str,
) -> Tensor:
    """DPO's loss of one pair, in Alpaca's template."""
    begin = tokenizer.encode(ALPACA.format(prompt=prompt))
    end = [tokenizer.special_tokens["<|endoftext|>"]]
    answers = [sequence_of(begin, [*tokenizer.encode(each), *end]) for each in (response_chosen, response_rejected)]
    with torch.no_grad():
        references = [_scores(lm_ref, _part([answer])).log_probabilities.numpy() for answer in answers]
    part = _part([answer.with_values(**{REFERENCE: known}) for answer, known in zip(answers, references, strict=True)])
    totals = BatchTotals.of_examples([tuple(answers)])
    loss, _ = preference_objective(PreferenceConfig("dpo", beta=beta)).loss(part, _scores(lm, part), totals)
    return loss


def get_packed_sft_dataset(
    tokenizer: Tokenizer, dataset_path: Path, seq_length: int, shuffle: bool
) -> list[dict[str, Tensor]]:
    """Windows of all examples' tokens, one after the other, with a separator before each; the incomplete one is left
    out."""
    return [
        {"input_ids": inputs, "labels": labels}
        for rows in _packed_rows(tokenizer, dataset_path, seq_length, shuffle, 1)
        for inputs, labels in zip(*rows, strict=True)
    ]


def run_parse_mmlu_response(mmlu_example: dict[str, Any], model_output: str) -> str | None:
    """The letter of one of the options."""
    letter = chosen_letter(model_output)
    return letter if letter in list("ABCD"[: len(mmlu_example["options"])]) else None


def run_parse_gsm8k_response(model_output: str) -> str | None:
    """The number that the text comes to."""
    return final_number(model_output)


ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{prompt}\n\n### Response:\n"
)
"""The template of the Alpaca data (Taori et al. 2023)."""


def _packed_rows(
    tokenizer: Tokenizer, dataset_path: Path, seq_length: int, shuffle: bool, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    examples = [json.loads(line) for line in dataset_path.read_text().splitlines()]
    texts = [ALPACA.format(prompt=example["prompt"]) + example["response"] for example in examples]
    if shuffle:
        texts = [texts[number] for number in KeyedPermutation(len(texts), 1)(np.arange(len(texts)))]
    path = dataset_path.with_suffix(f".{shuffle}.tokens")
    file = write_token_file(path, [Document(str(number), text) for number, text in enumerate(texts)], tokenizer)
    n_whole = (file.n_tokens - 1) // seq_length
    for number, rows in enumerate(evaluation_windows(file, seq_length, seq_length, batch_size)):
        if number * batch_size < n_whole:
            left = n_whole - number * batch_size
            yield rows[0][:left], rows[1][:left]


def _train_step(
    objective: Objective, policy_log_probs: Tensor, mask: Tensor, n_micro_batches: int, **values: Tensor
) -> Loss:
    """A micro-batch's part of the loss of `n_micro_batches` alike, and its backward pass."""
    part = _part_of_mask(mask, values)
    terms = policy_log_probs[mask]
    n = len(mask) * n_micro_batches
    totals = BatchTotals(int(mask.sum()) * n_micro_batches, n, n)
    loss, metrics = objective.loss(part, TokenScores(terms, torch.zeros_like(terms), None), totals)
    loss.backward()
    return loss.detach(), metrics


def _rows_along(tensor: Tensor, mask: Tensor, dim: int | None) -> tuple[SequenceMicroBatch, Tensor, tuple[int, ...]]:
    """A micro-batch with a sequence for each row along a dimension, the terms that count, and the result's shape."""
    if dim is None:
        rows, marks, shape = tensor.reshape(1, -1), mask.reshape(1, -1), ()
    else:
        moved = tensor.movedim(dim, -1)
        rows, marks, shape = moved.flatten(0, -2), mask.movedim(dim, -1).flatten(0, -2), tuple(moved.shape[:-1])
    return _part_of_mask(marks), rows[marks], shape


def _part_of_mask(mask: Tensor, values: dict[str, Tensor] | None = None) -> SequenceMicroBatch:
    """Rows of tokens that all follow one that does not count, of which those count that the mask selects."""
    sequences = []
    for number, row in enumerate(mask):
        loss_mask = torch.cat([torch.zeros(1, dtype=torch.bool), row]).numpy()
        own: dict[str, Any] = {name: each[number][row].numpy() for name, each in (values or {}).items()}
        sequences.append(TokenSequence(torch.zeros(len(loss_mask), dtype=torch.int64).numpy(), loss_mask, own))
    return _part(sequences, units_of_one=True)


def _part(sequences: list[TokenSequence], *, units_of_one: bool = False) -> SequenceMicroBatch:
    examples = [(each,) for each in sequences] if units_of_one else [tuple(sequences)]
    length = max(len(each.tokens) for each in sequences)
    (part,) = micro_batches_of(examples, max_tokens=2**40, row_length=length, packing="padded")
    return part


def _scores(model: Transformer, part: SequenceMicroBatch) -> TokenScores:
    rows = part.rows
    return model.token_scores(rows.inputs, rows.places, rows.targets, rows.documents)
