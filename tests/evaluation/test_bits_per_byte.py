import dataclasses
import gzip
import math
import subprocess
from pathlib import Path

import pytest
import torch

from napkin.data.corpus import Document
from napkin.data.token_file import SEPARATOR, Sidecar, TokenFile
from napkin.data.token_writer import write_token_file
from napkin.errors import NapkinError
from napkin.evaluation.bits_per_byte import evaluate, mean_loss, sampled_bits_per_byte
from napkin.model.transformer import Transformer
from napkin.recipe.precision import Precision
from napkin.tokenizer.bpe import ByteTokenizer
from oracles.tiny_run import MODEL

FP32 = Precision("fp32", "cpu")
TOKENIZER = ByteTokenizer([SEPARATOR])
TEXTS = ["the first document, which is short", "ein zweites, mit Umlauten: äöü — und Gedankenstrich " * 3, "x"]


def make_model() -> Transformer:
    model = Transformer(dataclasses.replace(MODEL, vocab_size=TOKENIZER.vocab_size, context_length=16))
    # Weights as they begin know nothing; larger ones make each position's loss its own.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    documents = [Document(name=str(n), text=text) for n, text in enumerate(TEXTS)]
    return write_token_file(tmp_path / "text.tokens", documents, TOKENIZER)


@torch.no_grad()
def loss_token_by_token(model: Transformer, ids: list[int], stride: int) -> list[float]:
    """Nats of every token but the first, by the windows' definition: one forward pass a token."""
    context_length = model.config.context_length
    losses: list[float] = []
    for target in range(1, len(ids)):
        # Windows begin every `stride` tokens; the first one that reaches the target scores it.
        window = max(0, math.ceil((target - context_length) / stride))
        logits = model(torch.tensor([ids[window * stride : target]]))[0, -1].double()
        losses.append(float(logits.logsumexp(0) - logits[ids[target]]))
    return losses


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("stride", [1, 7, 8, 16])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_loss_is_that_of_every_token_predicted_by_itself(tokens: TokenFile, stride: int, batch_size: int) -> None:
    model = make_model()
    expected = loss_token_by_token(model, tokens.tokens.tolist(), stride)
    found = mean_loss(model, tokens, FP32, stride=stride, batch_size=batch_size)
    assert found == pytest.approx(sum(expected) / len(expected), rel=1e-5)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("max_tokens", [1, 16, 50, 51, 10_000])
def test_a_sample_is_the_first_tokens_and_no_others(tokens: TokenFile, max_tokens: int) -> None:
    model = make_model()
    expected = loss_token_by_token(model, tokens.tokens.tolist(), 16)[:max_tokens]
    seen: list[int] = []
    found = mean_loss(
        model, tokens, FP32, max_tokens=max_tokens, batch_size=2, progress=lambda *counts: seen.extend(counts)
    )
    assert found == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert seen[-2:] == [len(expected), len(expected)]


def test_windows_beyond_the_sample_are_not_computed(tokens: TokenFile) -> None:
    model, seen = make_model(), []
    model.embedding.register_forward_hook(lambda module, given, result: seen.append(given[0].numel()))
    mean_loss(model, tokens, FP32, max_tokens=20, stride=8, batch_size=8)
    # A context of 16, then 8 more tokens by each window: two windows hold the first 20.
    assert sum(seen) == 2 * 16


def test_a_model_that_knows_nothing_pays_the_vocabulary_for_every_token(tokens: TokenFile) -> None:
    model = make_model()
    with torch.no_grad():
        model.head_weight.zero_()
    found = evaluate(model, tokens, TOKENIZER, FP32, step=7)
    text_bytes = sum(len(text.encode()) for text in TEXTS)
    n_tokens = text_bytes + len(TEXTS) + 1
    assert (found.step, found.bytes, found.tokens) == (7, text_bytes, n_tokens - 1)
    assert found.loss == pytest.approx(math.log(257), rel=1e-6)
    assert found.perplexity == pytest.approx(257, rel=1e-5)
    assert found.bits_per_byte == pytest.approx(math.log2(257) * (n_tokens - 1) / text_bytes, rel=1e-6)


@pytest.mark.parametrize(("command", "name"), [("gzip", "gzip_bits_per_byte"), ("xz", "xz_bits_per_byte")])
def test_compressors_make_of_a_text_what_their_commands_make(tmp_path: Path, command: str, name: str) -> None:
    text = Path(subprocess.__file__).read_text()[:20_000]
    tokens = write_token_file(tmp_path / "text.tokens", [Document(name="a", text=text)], TOKENIZER)
    found = evaluate(make_model(), tokens, TOKENIZER, FP32)
    done = subprocess.run([command, "-9"], input=text.encode(), capture_output=True, check=True)
    # Headers hold a name or a time more or less; zlib comes in kinds that differ by parts of a per cent.
    assert getattr(found, name) * found.bytes / 8 == pytest.approx(len(done.stdout), rel=0.005, abs=20)


def test_a_file_of_separators_alone_is_refused(tmp_path: Path) -> None:
    tokens = write_token_file(tmp_path / "text.tokens", [Document(name="a", text="")], TOKENIZER)
    with pytest.raises(NapkinError, match="no text"):
        evaluate(make_model(), tokens, TOKENIZER, FP32)


def test_evaluation_changes_neither_weights_nor_random_state(tokens: TokenFile) -> None:
    model = make_model()
    before = [parameter.clone() for parameter in model.parameters()]
    state = torch.get_rng_state()
    evaluate(model, tokens, TOKENIZER, FP32)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(new, old) for new, old in zip(model.parameters(), before, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bytes_that_are_not_predicted_are_not_divided_by(tokens: TokenFile) -> None:
    """A file that does not begin with a separator, as other programs write them: its first token is not predicted."""
    described = Sidecar(
        "napkin-tokens", 1, "uint16", tokens.n_tokens - 1, 3, 100, 257, tokens.tokenizer_fingerprint,
        tokens.separator, "0" * 64,
    )  # fmt: skip
    cut = TokenFile(tokens.path, tokens.tokens[1:], described)
    assert cut.tokens[0] != cut.separator
    model = make_model()
    found = evaluate(model, cut, TOKENIZER, FP32)
    predicted = "".join(TEXTS).encode()[1:]
    assert found.bytes == len(predicted)
    losses = loss_token_by_token(model, cut.tokens.tolist(), 8)
    assert found.bits_per_byte == pytest.approx(sum(losses) / math.log(2) / len(predicted), rel=1e-5)
    assert found.gzip_bits_per_byte == 8 * len(gzip.compress(predicted, compresslevel=9)) / len(predicted)
    sampled, n_tokens = sampled_bits_per_byte(model, cut, TOKENIZER, FP32, max_tokens=10**6)
    assert n_tokens == found.tokens
    assert sampled == pytest.approx(found.bits_per_byte, rel=1e-9)
