"""The language model: token ids in, a score for every possible next token out."""

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from napkin.errors import NapkinError
from napkin.model.block import Block
from napkin.model.config import ModelConfig
from napkin.model.embedding import Embedding
from napkin.model.linear import Linear
from napkin.model.loss import linear_cross_entropy
from napkin.model.normalization import RMSNorm
from napkin.model.position import RotaryEmbedding

# Hidden states have a root mean square of 1, so a head of std 0.3/sqrt(d_model) makes logits of std 0.3: the loss
# starts 0.3²/2 nats above ln(vocab_size), and the first steps need not unlearn an opinion.
_FIRST_LOGITS_STD = 0.3


class Transformer(nn.Module):
    """A decoder-only Transformer: pre-norm, RMSNorm, rotary positions, SwiGLU, no biases.

    Its parameters start as a pure function of config and seed, on the default device and in the default dtype;
    torch's global random state is neither read nor changed. What writes into the residual stream starts smaller by
    1/sqrt(2 · n_layers), so that the stream does not grow with depth (Radford et al. 2019).

    A tied embedding starts as the head it also is and is scaled by sqrt(d_model) on its way in, to a root mean
    square of 0.3: large enough for the blocks to see, small enough that a token's own vector does not dominate its
    last hidden state. At 1 each token would expect itself, and the loss would start near sqrt(d_model).
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise NapkinError("vocab_size is 0: give the model its tokenizer's vocab_size")
        self.config = config
        generator = torch.Generator().manual_seed(seed)
        head_std = _FIRST_LOGITS_STD * config.d_model**-0.5
        self.embedding = Embedding(
            config.vocab_size,
            config.d_model,
            std=head_std if config.tie_embeddings else 1.0,
            generator=generator,
        )
        self.input_scale = config.d_model**0.5 if config.tie_embeddings else 1.0
        self.rotary = RotaryEmbedding(config.head_dim, config.context_length, theta=config.rope_theta)
        self.blocks = nn.ModuleList(
            Block(
                config.d_model,
                config.n_heads,
                config.resolved_n_kv_heads,
                config.resolved_d_ff,
                norm_eps=config.norm_eps,
                residual_scale=(2 * config.n_layers) ** -0.5,
                generator=generator,
            )
            for _ in range(config.n_layers)
        )
        self.norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.head = (
            None
            if config.tie_embeddings
            else Linear(config.d_model, config.vocab_size, std=head_std, generator=generator)
        )

    def forward(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position vocab_size"]:
        """Logits of the token after each position."""
        return F.linear(self.hidden(tokens), self.head_weight)

    def loss(self, tokens: Int[Tensor, "batch position"], targets: Int[Tensor, "batch position"]) -> Float[Tensor, ""]:
        """Mean cross-entropy in nats a token, where targets[b, t] follows tokens[b, t]; -1 does not count.

        The logits never all exist, see napkin.model.loss.
        """
        hidden = rearrange(self.hidden(tokens), "b t c -> (b t) c")
        return linear_cross_entropy(hidden, self.head_weight, rearrange(targets, "b t -> (b t)"))

    def hidden(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position d_model"]:
        """The normalised hidden states that the head reads.

        Raises NapkinError for sequences beyond the config's context_length.
        """
        length, limit = tokens.shape[1], self.config.context_length
        if length > limit:
            raise NapkinError(
                f"a sequence of {length} tokens exceeds context_length {limit}: shorten it, or build the "
                f"model with context_length {length}"
            )
        x = self.embedding(tokens) * self.input_scale
        cosines, signed_sines = self.rotary(length)
        for block in self.blocks:
            x = block(x, cosines, signed_sines)
        return self.norm(x)

    @property
    def head_weight(self) -> Float[Tensor, "vocab_size d_model"]:
        """The matrix that turns hidden states into logits; the embedding's own where they are tied."""
        return self.embedding.weight if self.head is None else self.head.weight
