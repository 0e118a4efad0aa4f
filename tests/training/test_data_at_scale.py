"""Several files, documents kept apart, batches prepared ahead: through the same path as a run takes."""

import dataclasses
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from napkin.accounting.metering import meter_step
from napkin.data import Batches, Document, TokenFile, TokenMixture, document_ids, write_token_file
from napkin.errors import NapkinError
from napkin.evaluation.bits_per_byte import mean_loss
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.runs.metrics import read_metrics
from napkin.runs.run_folder import RunFolder
from napkin.tokenizer.bpe import ByteTokenizer
from napkin.train_step.step import build_train_state
from napkin.train_step.step_ledger import count_step
from napkin.training.pretraining import Pretraining
from napkin.training.run import create_run, train_run
from oracles.tiny_run import tiny_recipe, with_recipe, write_tiny_text

STEPS = 6


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_tiny_text(folder)
    tokenizer = ByteTokenizer(["<|endoftext|>"])
    short = [Document(str(n), "ab" * n) for n in range(1, 40)]
    write_token_file(folder / "short.tokens", short, tokenizer)
    return folder


def recipe_of(text: Path, **data: Any) -> Recipe:
    return recipe_with(tiny_recipe(text, steps=STEPS, checkpoint_every=2, evaluate_every=3), **data)


def recipe_with(recipe: Recipe, **data: Any) -> Recipe:
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, **data))


def losses(run: RunFolder) -> list[tuple[int, float, float, float | None]]:
    found = read_metrics(run.path / "metrics.jsonl")
    return [(line.step, line.loss, line.gradient_norm, line.validation_loss) for line in found]


def several(text: Path) -> dict[str, float]:
    return {f"{text}/train.tokens": 3.0, f"{text}/short.tokens": 1.0}


def resumed_after(step: int, preparation: Pretraining, path: Path) -> RunFolder:
    """A run that is stopped after a step and taken up again."""
    run = RunFolder.create(path, preparation.recipe, preparation.tokenizer)
    stopped = train_run(
        preparation, run, on_step=lambda m: signal.raise_signal(signal.SIGTERM) if m.step == step else None
    )
    assert stopped.step == step
    assert train_run(preparation, run).step == STEPS
    return run


@pytest.mark.torture
def test_a_run_on_several_files_resumes_as_if_never_stopped_and_refuses_other_weights(
    text: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(text, train=several(text), separate_documents=True)
    preparation, whole = create_run(recipe, tmp_path / "whole")
    assert isinstance(preparation, Pretraining)
    train_run(preparation, whole)
    assert losses(resumed_after(3, preparation, tmp_path / "run")) == losses(whole)
    ahead = with_recipe(preparation, recipe_with(preparation.recipe, prefetch="on"))
    assert losses(resumed_after(4, ahead, tmp_path / "ahead")) == losses(whole)
    assert not [thread for thread in threading.enumerate() if thread.name == "napkin batches"]
    other = dataclasses.replace(preparation, train_tokens=TokenMixture(preparation.train_tokens.files, [2, 1]))
    with pytest.raises(NapkinError, match="training data"):
        train_run(other, whole)


@pytest.mark.thorough
def test_a_run_goes_on_with_as_many_sequences_a_step_as_it_began_with(text: Path, tmp_path: Path) -> None:
    preparation, run = create_run(recipe_of(text, train=several(text)), tmp_path / "run")
    assert isinstance(preparation, Pretraining)
    train_run(preparation, run, on_step=lambda m: signal.raise_signal(signal.SIGTERM) if m.step == 3 else None)
    training = dataclasses.replace(preparation.recipe.training, batch_size=6)
    other = with_recipe(preparation, dataclasses.replace(preparation.recipe, training=training))
    with pytest.raises(NapkinError, match=r"training.batch_size.*6.*trained.*4"):
        train_run(other, run)
    assert train_run(preparation, run).step == STEPS


@pytest.mark.thorough
def test_any_of_several_files_that_changes_under_the_run_is_noticed(text: Path, tmp_path: Path) -> None:
    write_token_file(tmp_path / "a", [Document("", "first" * 30)], ByteTokenizer(["<|endoftext|>"]))
    (tmp_path / "b").write_bytes((text / "short.tokens").read_bytes())
    (tmp_path / "b.json").write_bytes((text / "short.tokens.json").read_bytes())
    recipe = recipe_of(text, train=(f"{tmp_path}/a", f"{tmp_path}/b"))
    preparation, run = create_run(recipe, tmp_path / "run")

    def spoil(metrics: Any) -> None:
        if metrics.step == 3:
            with open(tmp_path / "b", "r+b") as file:
                file.write(b"\x05\x00")

    with pytest.raises(NapkinError, match="b' was altered"):
        train_run(preparation, run, on_step=spoil)


CONFIGS = {
    "rope": {},
    "learned": {"positions": "learned"},
    "alibi": {"positions": "alibi"},
    "plain": {"attention": "plain", "attention_window": 9},
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_no_gradient_crosses_from_one_document_to_another(text: Path, config: dict[str, Any]) -> None:
    model = Transformer(ModelConfig(257, context_length=32, d_model=16, n_layers=2, n_heads=2, **config))
    tokens = TokenFile.open(text / "short.tokens")
    batches = Batches(tokens, context_length=32, batch_size=4, seed=0, separate_documents=True, windows="fixed")
    inputs, targets, documents = batches[0]
    assert torch.equal(documents, document_ids(inputs, tokens.separator))
    embedded: list[torch.Tensor] = []

    def keep(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    model.embedding.register_forward_hook(keep)
    checked = 0
    for row in range(4):
        for place in range(0, 32, 3):
            embedded.clear()
            alone = torch.full_like(targets, -1)
            alone[row, place] = targets[row, place]
            loss = model.loss(inputs, alone, documents)
            (gradient,) = torch.autograd.grad(loss, embedded)
            reached = gradient.abs().sum(dim=-1).nonzero().tolist()
            own = [[row, at] for at in range(place + 1) if documents[row, at] == documents[row, place]]
            window = model.config.attention_window
            # Two layers of a window see twice as far as one.
            assert reached == (own if window is None else own[-2 * window + 1 :])
            checked += len(own) <= place
    assert checked > 4, "most windows must hold several documents"


def test_a_document_in_a_window_is_predicted_as_if_it_stood_alone(text: Path) -> None:
    model = Transformer(ModelConfig(257, context_length=32, d_model=16, n_layers=2, n_heads=2, positions="learned"))
    tokens = TokenFile.open(text / "short.tokens")
    inputs, _, documents = Batches(
        tokens, context_length=32, batch_size=1, seed=0, separate_documents=True, windows="fixed"
    )[0]
    packed = model(inputs, documents)
    for number in documents.unique():
        own = documents[0] == number
        torch.testing.assert_close(packed[:, own], model(inputs[:, own]))


def test_an_evaluation_with_separate_documents_is_the_mean_over_documents_alone(tmp_path: Path) -> None:
    documents = [Document(str(n), "xyz" * n) for n in range(1, 8)]
    tokens = write_token_file(tmp_path / "t", documents, ByteTokenizer(["<|endoftext|>"]))
    model = Transformer(ModelConfig(257, context_length=128, d_model=16, n_layers=1, n_heads=2)).eval()
    assert tokens.n_tokens < 128
    found = mean_loss(model, tokens, Precision("fp32", "cpu"), separate_documents=True)
    nats, n_tokens = 0.0, 0
    for document in documents:
        ids = torch.tensor([[256, *document.text.encode(), 256]])
        nats += model.loss(ids[:, :-1], ids[:, 1:]).item() * (ids.shape[1] - 1)
        n_tokens += ids.shape[1] - 1
    assert found == pytest.approx(nats / n_tokens, rel=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("micro_batch_size", [4, 2])
def test_a_step_with_separate_documents_is_counted_to_the_flop_and_the_byte(text: Path, micro_batch_size: int) -> None:
    recipe = recipe_of(text, separate_documents=True)
    model = dataclasses.replace(recipe.model, vocab_size=257)
    training = dataclasses.replace(recipe.training, micro_batch_size=micro_batch_size)
    recipe = dataclasses.replace(recipe, model=model, training=training)
    precision = Precision("fp32", "cpu")
    ledger = count_step(ResolvedRecipe(recipe, precision))
    mixture = TokenMixture([TokenFile.open(text / "short.tokens")])
    batches = Batches(mixture, context_length=32, batch_size=4, seed=0, separate_documents=True)
    train_state = build_train_state(ResolvedRecipe(recipe, precision))
    for number in range(2):
        train_state.step(number, *batches[number])
    batch = batches[2]
    metered = meter_step(train_state.model, lambda: train_state.step(2, *batch))
    assert metered.ledger.flops == ledger.flops
    assert abs(metered.peak_bytes - ledger.peak_bytes) <= 96
    plain = count_step(ResolvedRecipe(recipe_with(recipe, separate_documents=False), precision))
    assert ledger.peak_bytes > plain.peak_bytes
