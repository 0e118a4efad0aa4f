"""What the checks of Stanford's CS336, assignment 5, ask of alignment, on inputs of our own; what is expected is
computed in float64 NumPy. The shapes are those of its fixtures: 2 rows of 10 tokens, 100 logits, groups of 4."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.tokenizer.bpe import ByteTokenizer
from tuning.course_adapters import (
    ALPACA,
    get_packed_sft_dataset,
    run_compute_entropy,
    run_compute_group_normalized_rewards,
    run_compute_grpo_clip_loss,
    run_compute_naive_policy_gradient_loss,
    run_compute_per_instance_dpo_loss,
    run_compute_policy_gradient_loss,
    run_get_response_log_probs,
    run_grpo_microbatch_train_step,
    run_masked_mean,
    run_masked_normalize,
    run_parse_gsm8k_response,
    run_parse_mmlu_response,
    run_sft_microbatch_train_step,
    run_tokenize_prompt_and_output,
)

GENERATOR = np.random.default_rng(336)
LOGITS = GENERATOR.normal(size=(2, 10, 100))
MASK = GENERATOR.random(LOGITS.shape) > 0.5
NEW = GENERATOR.normal(size=(2, 10))
OLD = NEW + GENERATOR.normal(size=(2, 10))
RESPONSE = GENERATOR.random((2, 10)) > 0.5
REWARDS = GENERATOR.random((2, 1))
ADVANTAGES = REWARDS - REWARDS.mean()
TOKENIZER = ByteTokenizer(["<|endoftext|>"])
CONFIG = ModelConfig(vocab_size=257, context_length=256, d_model=16, n_layers=1, n_heads=2)


def tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array if array.dtype == bool else array.astype(np.float32))


def close(found: Tensor, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=tolerance, atol=tolerance)


def clipped(low: float, high: float) -> np.ndarray:
    ratio = np.exp(NEW - OLD)
    return -np.minimum(ratio * ADVANTAGES, np.clip(ratio, low, high) * ADVANTAGES)


def test_entropies() -> None:
    p = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    close(run_compute_entropy(tensor(LOGITS)), -(p * np.log(p)).sum(-1))


@pytest.mark.parametrize("dim", [0, 1, -1, None])
def test_masked_sums_and_means(dim: int | None) -> None:
    sums, loss_mask = np.where(MASK, LOGITS, 0).sum(dim), MASK.sum(dim)
    close(run_masked_normalize(tensor(LOGITS), tensor(MASK), dim, 42.0), sums / 42)
    means = np.divide(sums, loss_mask, out=np.full(np.shape(sums), np.nan), where=loss_mask > 0)
    close(run_masked_mean(tensor(LOGITS), tensor(MASK), dim), means)


def test_prompts_and_outputs_become_rows_with_a_mask() -> None:
    prompts, outputs = ["Hello, world!", "A test.", " "], ["Hi", "Another test!", "x"]
    found = run_tokenize_prompt_and_output(prompts, outputs, TOKENIZER)
    length = max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True))
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        text = (prompt + output).encode().ljust(length, b"\0")
        assert found["input_ids"][row].tolist() == list(text[:-1])
        assert found["labels"][row].tolist() == list(text[1:])
        mask = [len(prompt) <= place < len(prompt) + len(output) for place in range(1, length)]
        assert found["response_mask"][row].tolist() == mask


def test_log_probabilities_and_entropies_of_a_model() -> None:
    model = Transformer(CONFIG)
    tokens = torch.from_numpy(GENERATOR.integers(0, 257, (2, 11)))
    found = run_get_response_log_probs(model, tokens[:, :-1], tokens[:, 1:], return_token_entropy=True)
    with torch.no_grad():
        logits = model(tokens[:, :-1]).double().numpy()
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    close(found["log_probs"], np.take_along_axis(logprobs, tokens[:, 1:, None].numpy(), -1)[..., 0])
    close(found["token_entropy"], -(np.exp(logprobs) * logprobs).sum(-1))
    assert "token_entropy" not in run_get_response_log_probs(model, tokens[:, :-1], tokens[:, 1:], False)


@pytest.mark.parametrize("constant", [1.0, 42.0])
def test_a_supervised_step_of_a_micro_batch(constant: float) -> None:
    logprobs = tensor(NEW).requires_grad_()
    for step in range(1, 4):
        loss, _ = run_sft_microbatch_train_step(logprobs, tensor(RESPONSE), 2, constant)
        close(loss, -np.where(RESPONSE, NEW, 0).sum() / constant / 2 / 2)
        assert logprobs.grad is not None
        close(logprobs.grad, -step * RESPONSE / constant / 2 / 2)


@pytest.mark.parametrize("by_std", [True, False])
def test_rewards_become_advantages_of_groups(by_std: bool) -> None:
    rewards = GENERATOR.integers(0, 10, 8) / 10
    answers = [str(number) for number in range(8)]
    found, raw, _ = run_compute_group_normalized_rewards(
        lambda answer, _: {"reward": rewards[int(answer)]}, answers, ["42"] * 8, 4, 1e-6, by_std
    )
    groups = rewards.reshape(2, 4)
    expected = groups - groups.mean(1, keepdims=True)
    if by_std:
        expected /= groups.std(1, ddof=1, keepdims=True) + 1e-6
    close(raw, rewards)
    close(found, expected.flatten())


def test_terms_of_policies() -> None:
    new, old, rewards, advantages = tensor(NEW), tensor(OLD), tensor(REWARDS), tensor(ADVANTAGES)
    close(run_compute_naive_policy_gradient_loss(rewards, new), -REWARDS * NEW)
    for cliprange in (10.0, 0.1):
        close(
            run_compute_grpo_clip_loss(advantages, new, old, cliprange)[0], clipped(1 - cliprange, 1 + cliprange), 1e-4
        )
    expected = {
        "no_baseline": -REWARDS * NEW,
        "reinforce_with_baseline": -ADVANTAGES * NEW,
        "grpo_clip": clipped(0.5, 1.5),
    }
    for kind, terms in expected.items():
        close(run_compute_policy_gradient_loss(new, kind, rewards, advantages, old, 0.5)[0], terms, 1e-4)


@pytest.mark.parametrize("kind", ["no_baseline", "reinforce_with_baseline", "grpo_clip"])
def test_a_policy_step_of_a_micro_batch(kind: str) -> None:
    ratio = np.exp(NEW - OLD)
    # Where the clip does not act the derivative of ratio · A is ratio · A.
    acts = clipped(0.9, 1.1) != -ratio * ADVANTAGES
    terms, slopes = {
        "no_baseline": (-REWARDS * NEW, -REWARDS + 0 * NEW),
        "reinforce_with_baseline": (-ADVANTAGES * NEW, -ADVANTAGES + 0 * NEW),
        "grpo_clip": (clipped(0.9, 1.1), np.where(acts, 0, -ratio * ADVANTAGES)),
    }[kind]
    weights = RESPONSE / RESPONSE.sum(1, keepdims=True) / 2 / 2
    logprobs = tensor(NEW).requires_grad_()
    for step in range(1, 4):
        loss, _ = run_grpo_microbatch_train_step(
            logprobs, tensor(RESPONSE), 2, kind, tensor(REWARDS), tensor(ADVANTAGES), tensor(OLD), 0.1
        )
        close(loss, (terms * weights).sum())
        assert logprobs.grad is not None
        close(logprobs.grad, step * slopes * weights)


def test_the_loss_of_a_pair() -> None:
    model, reference = Transformer(CONFIG, seed=1), Transformer(CONFIG, seed=2)
    prompt, answers = "The quick brown fox jumps over", ("the lazy dog.", "their crazy frog.")
    loss = run_compute_per_instance_dpo_loss(model, reference, TOKENIZER, 0.5, prompt, *answers)
    ratios = []
    for answer in answers:
        text = ALPACA.format(prompt=prompt).encode()
        tokens = torch.tensor([[*text, *answer.encode(), 256]])
        sums = []
        for each in (model, reference):
            with torch.no_grad():
                logits = each(tokens[:, :-1])[0].double().numpy()
            logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            places = np.arange(len(text) - 1, tokens.shape[1] - 1)
            sums.append(logprobs[places, tokens[0, 1:].numpy()[places]].sum())
        ratios.append(sums[0] - sums[1])
    close(loss, np.log1p(np.exp(-0.5 * (ratios[0] - ratios[1]))))


def test_packed_examples(tmp_path: Path) -> None:
    examples = [{"prompt": f"Say {n} {'again ' * n}", "response": f"{n}!"} for n in range(9)]
    path = tmp_path / "sft.jsonl"
    path.write_text("\n".join(json.dumps(example) for example in examples))
    found = get_packed_sft_dataset(TOKENIZER, path, 32, shuffle=False)
    texts = [(ALPACA.format(prompt=each["prompt"]) + each["response"]).encode() for each in examples]
    tokens = np.array([token for text in texts for token in (256, *text)])
    n = (len(tokens) - 1) // 32
    assert len(found) == n
    for number, example in enumerate(found):
        assert example["input_ids"].tolist() == tokens[number * 32 :][:32].tolist()
        assert example["labels"].tolist() == tokens[number * 32 + 1 :][:32].tolist()
    shuffled = get_packed_sft_dataset(TOKENIZER, path, 32, shuffle=True)
    assert len(shuffled) == n
    assert any(not torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(found, shuffled, strict=True))


def test_the_letter_of_an_option_is_the_answer() -> None:
    example = {"options": ["Oslo", "Rome", "Bern", "Riga"]}
    assert run_parse_mmlu_response(example, "The correct answer is B. Rome is the capital of Italy.") == "B"
    assert run_parse_mmlu_response(example, "The correct answer is 10000 cities.") is None
    assert run_parse_mmlu_response(example, "The answer is E.") is None


def test_the_last_number_is_the_answer() -> None:
    assert run_parse_gsm8k_response("She sold 48/2 = 24 in May, so 48+24 = 72 in both.") == "72"
    assert run_parse_gsm8k_response("She sold twenty-four, so seventy-two in both.") is None
