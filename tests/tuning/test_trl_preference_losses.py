"""Losses and gradients on pairs are those of TRL, where both compute the same: run with TRL installed."""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from napkin.chats.chat_encoder import ChatEncoder
from napkin.chats.token_sequence import Example, TokenSequence
from napkin.recipe.tuning_recipe import PreferenceConfig, PreferenceRecipe
from napkin.tokenizer.bpe import ByteTokenizer
from napkin.training.method import Setting
from napkin.tuning.example_file import write_example_file
from napkin.tuning.method import TuningContext
from napkin.tuning.preference_method import PreferenceMethod, UnpairedExamples
from napkin.tuning.preferences import DESIRABLE, dpo_losses, ipo_losses, orpo_losses, simpo_losses
from napkin.tuning.sequence_step import REFERENCE
from oracles.alignment_cases import MODEL, gradient_of, train_state_of
from peers import peer

pytestmark = pytest.mark.peers
PAIRS, LENGTH = 5, 9
CPU = SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x)


def log_probabilities(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (-3 * torch.rand(shape, generator=generator, dtype=torch.float64)).requires_grad_()


def gradients(loss: Tensor, *of: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, of))


def dpo_trainer_loss(tokens: Tensor, mask: Tensor, reference: Tensor, **settings: Any) -> Tensor:
    """What TRL's DPO trainer computes of these log-probabilities, the chosen answers above the rejected ones."""
    trainer = peer("trl.trainer.dpo_trainer").DPOTrainer
    nothing = torch.zeros_like(tokens)
    outputs = MagicMock(log_probs=tokens * mask, entropy=nothing, mean_logits=nothing, is_top1=nothing > 0)
    chosen, rejected = reference.chunk(2)
    inputs = {
        "input_ids": torch.zeros(2 * PAIRS, LENGTH + 1, dtype=torch.int64),
        "completion_mask": torch.cat([torch.zeros(2 * PAIRS, 1, dtype=torch.int64), mask], dim=1),
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    own = MagicMock(
        accelerator=CPU,
        aux_loss_enabled=False,
        f_divergence_type="reverse_kl",
        label_smoothing=0.0,
        ld_alpha=None,
        model=SimpleNamespace(training=False),
        loss_weights=[1.0],
        precompute_ref_logps=True,
        use_weighting=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        **settings,
    )
    return trainer._compute_loss(own, lambda **_: outputs, inputs, return_outputs=False)


@pytest.mark.parametrize(
    ("settings", "losses", "per_token"),
    [
        ({"loss_types": ["sigmoid"], "beta": 0.3}, lambda c, r: dpo_losses(c, r, beta=0.3), False),
        ({"loss_types": ["ipo"], "beta": 0.2}, lambda c, r: ipo_losses(c, r, beta=0.2), True),
    ],
    ids=["dpo", "ipo"],
)
def test_a_loss_with_a_reference_is_that_of_trl(settings: dict[str, Any], losses: Any, per_token: bool) -> None:
    tokens, reference = log_probabilities(1, 2 * PAIRS, LENGTH), log_probabilities(2, 2 * PAIRS).detach() * LENGTH / 2
    lengths = torch.arange(2 * PAIRS) % LENGTH + 1
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    theirs = dpo_trainer_loss(tokens, mask, reference, **settings)
    ratios = (tokens * mask).sum(dim=1) - reference
    ours = losses(*(ratios / lengths if per_token else ratios).chunk(2)).mean()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-9)
    assert torch.allclose(gradients(ours, tokens)[0], gradients(theirs, tokens)[0], rtol=1e-9, atol=1e-12)


def test_orpo_is_that_of_trl() -> None:
    trainer = peer("trl.experimental.orpo.orpo_trainer").ORPOTrainer
    chosen, rejected = log_probabilities(3, PAIRS), log_probabilities(4, PAIRS)
    odds, *_ = trainer.odds_ratio_loss(SimpleNamespace(beta=0.4, accelerator=CPU), chosen, rejected)
    theirs, ours = (-chosen - odds).mean(), orpo_losses(chosen, rejected, beta=0.4).mean()
    # TRL computes in fp32.
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    for mine, other in zip(gradients(ours, chosen, rejected), gradients(theirs, chosen, rejected), strict=True):
        assert torch.allclose(mine, other.double(), rtol=1e-5)


def test_simpo_is_that_of_trl() -> None:
    trainer = peer("trl.experimental.cpo.cpo_trainer").CPOTrainer
    chosen, rejected = log_probabilities(5, PAIRS), log_probabilities(6, PAIRS)
    own = SimpleNamespace(alpha=0.0, beta=2.0, simpo_gamma=0.7, label_smoothing=0.0, loss_type="simpo", accelerator=CPU)
    theirs = trainer.cpo_loss(own, chosen, rejected)[0].mean()
    ours = simpo_losses(chosen, rejected, beta=2.0, margin=0.7).mean()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-9)
    for mine, other in zip(gradients(ours, chosen, rejected), gradients(theirs, chosen, rejected), strict=True):
        assert torch.allclose(mine, other, rtol=1e-9)


def judged(path: Path) -> list[Example]:
    """Units (answer, mismatched) of good and bad answers: pairs, and two prompts with one answer each."""
    lines = [{"prompt": f"{n}+{n}?", "chosen": str(2 * n), "rejected": str(2 * n + 1)} for n in (1, 7, 60)]
    lines += [{"prompt": prompt, "completion": "yes", "label": label} for prompt, label in (("a?", True), ("b", False))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    encoder = ChatEncoder(ByteTokenizer(["<|endoftext|>"]))
    return [
        *UnpairedExamples(
            write_example_file(path.with_suffix(".tokens"), "judged answers", path, encoder, max_length=64)
        )
    ]


def kto_trainer_loss(
    model: Callable[[Tensor], Tensor], examples: Sequence[Example], config: PreferenceConfig
) -> tuple[Tensor, float]:
    """What TRL's KTO trainer computes of these examples with a model of logits, and its estimate of the divergence."""
    trainer = peer("trl.trainer.kto_trainer").KTOTrainer

    def scored(input_ids: Tensor, labels: Tensor, **_: Any) -> MagicMock:
        log_probs = model(input_ids[:, :-1]).log_softmax(-1)
        taken = log_probs.gather(2, input_ids[:, 1:, None])[:, :, 0] * (labels[:, 1:] != -100)
        return MagicMock(log_probs=taken, entropy=torch.zeros_like(taken), mean_logits=torch.zeros_like(taken))

    inputs: dict[str, Any] = {"label": [bool(answer.values[DESIRABLE][0]) for answer, _ in examples]}
    inputs["label"] = torch.tensor(inputs["label"])
    for which, name in ((0, ""), (1, "KL_")):
        sequences = [example[which] for example in examples]
        tokens, loss_mask = (
            pad_sequence([torch.from_numpy(getattr(each, field)) for each in sequences], batch_first=True)
            for field in ("tokens", "loss_mask")
        )
        inputs |= {f"{name}input_ids": tokens, f"{name}completion_mask": loss_mask, f"{name}attention_mask": tokens}
        inputs[f"ref_{name}logps"] = torch.tensor([float(each.values[REFERENCE].sum()) for each in sequences])
    own = MagicMock(
        accelerator=CPU,
        aux_loss_enabled=False,
        beta=config.beta,
        calculate_KL=True,
        desirable_weight=config.desirable_weight,
        loss_type="kto",
        model=SimpleNamespace(training=False),
        precompute_ref_logps=True,
        undesirable_weight=config.undesirable_weight,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    own._compute_kl_logps = partial(trainer._compute_kl_logps, own)
    loss = trainer._compute_loss(own, scored, inputs, return_outputs=False)
    return loss, own._metrics["eval"]["kl"][0]


@pytest.mark.parametrize("reference", [-6.2, -5.0], ids=["the model is likelier", "the reference is likelier"])
def test_kto_is_that_of_trl(tmp_path: Path, reference: float) -> None:
    """The loss and its gradient by each weight of the model, on the mismatched answers that napkin makes.

    TRL makes others. It rotates the answers of a micro-batch by one, so that an answer whose neighbour has the same
    prompt meets an answer to its own; napkin takes the answer to the next other prompt of the whole file. And TRL
    estimates the divergence anew for each micro-batch: averaged over ranks, but not over the micro-batches that add up
    to a batch, so that its loss depends on their size. Here both have one micro-batch. The estimate is positive in the
    first case; in the second it is at its bound, 0.
    """
    draw = np.random.default_rng(5)

    def referred(sequence: TokenSequence) -> TokenSequence:
        return sequence.with_values(**{REFERENCE: draw.normal(reference, 0.3, sequence.n_trained).astype(np.float32)})

    examples: list[Example] = [tuple(map(referred, example)) for example in judged(tmp_path / "judged.jsonl")]
    config = PreferenceConfig("kto", beta=0.3, desirable_weight=1.3, undesirable_weight=0.7)
    train_state = train_state_of(model=dataclasses.replace(MODEL, vocab_size=257, context_length=64))
    resolved = dataclasses.replace(train_state.resolved, recipe=PreferenceRecipe(preference=config))
    tokenizer = ByteTokenizer(["<|endoftext|>"])
    context = TuningContext(resolved, tokenizer, ChatEncoder(tokenizer), tmp_path / "run", Setting())
    method = PreferenceMethod(context, examples, [], "")
    gradient, step = gradient_of(
        train_state, method.prepared(train_state, examples), method.objective, max_tokens=method.max_tokens
    )
    loss, kl = kto_trainer_loss(train_state.model, examples, config)
    assert (kl > 0.1) if reference < -6 else (kl == 0)
    assert step.metrics["kl"] == pytest.approx(kl, rel=1e-4)
    assert step.loss == pytest.approx(loss.item(), rel=1e-5)
    theirs = torch.cat([each.flatten() for each in gradients(loss, *train_state.model.parameters())])
    assert float((gradient - theirs).norm() / theirs.norm()) < 1e-5
