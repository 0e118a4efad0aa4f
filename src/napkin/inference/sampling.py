"""Sampling from a model: one token after another, each drawn from the predicted distribution."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from napkin.errors import NapkinError
from napkin.inference.settings import Sampling
from napkin.model.language_model import evaluation_mode
from napkin.model.transformer import Transformer


@torch.no_grad()
def generate(
    model: Transformer, prompt: list[int], n_tokens: int, sampling: Sampling, *, stop: int | None = None
) -> Iterator[int]:
    """Yield up to `n_tokens` token ids that continue `prompt`, which holds at least one; end before a `stop`.

    Beyond the model's context length the oldest tokens are dropped.
    """
    if not prompt:
        raise NapkinError("the prompt holds no token: begin with a separator or with text")
    device = model.head_weight.device
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = list(prompt)
    for _ in range(n_tokens):
        window = torch.tensor([tokens[-model.config.context_length :]], device=device)
        # Only the logits of the last position are needed.
        with evaluation_mode(model):
            logits = model.logits_of(model.hidden(window)[0, -1].float())
        token = draw(logits.cpu(), sampling, generator)
        if token == stop:
            return
        tokens.append(token)
        yield token


def draw(logits: Float[Tensor, " vocab_size"], sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token id. Raises NapkinError where the logits hold NaN or infinity, as those of a diverged model may."""
    if not logits.isfinite().all():
        raise NapkinError("the model's logits hold infinity or NaN, nothing can be drawn: use an earlier checkpoint")
    if sampling.temperature == 0:
        return int(logits.argmax())
    # A stable sort puts the one that argmax would return first among equals. In float64, the probabilities of a large
    # vocabulary add up to 1; the maximum is subtracted first, so that division by a small temperature cannot overflow.
    likeliest, ids = logits.double().sort(descending=True, stable=True)
    probabilities = torch.softmax((likeliest - likeliest[0]) / sampling.temperature, dim=0)
    before = probabilities.cumsum(dim=0) - probabilities
    # The likeliest token is always kept: the sum before it is 0.
    probabilities = probabilities.where(before < sampling.top_p, 0)
    if sampling.top_k is not None:
        probabilities[sampling.top_k :] = 0
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])
