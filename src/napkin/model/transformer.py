"""The language model: token ids in, a score for every possible next token out."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from napkin.errors import NapkinError
from napkin.model.attention import Shared
from napkin.model.composition import Composition
from napkin.model.config import ModelConfig
from napkin.model.dropout import make_dropout
from napkin.model.embedding import Embedding
from napkin.model.experts import MixtureOfExperts, Routing
from napkin.model.linear import Linear
from napkin.model.loss import CHUNK_SIZE, linear_cross_entropy
from napkin.model.scale import make_scale

# Hidden states have a root mean square of 1, so a head of std 0.3/sqrt(d_model) makes logits of std 0.3: the loss
# starts 0.3²/2 nats above ln(vocab_size), and the first steps need not unlearn an opinion.
_FIRST_LOGITS_STD = 0.3

Tokens = Int[Tensor, "batch position"]
Documents = Int[Tensor, "batch position"] | None


class Transformer(nn.Module):
    """A decoder-only Transformer, composed as its config says.

    Its parameters start as a pure function of config and seed, on the default device and in the default dtype;
    torch's global random state is neither read nor changed. What writes into the residual stream starts smaller by
    1/sqrt(2 · n_layers), so that the stream does not grow with depth (Radford et al. 2019).

    A tied embedding starts as the head it also is and is scaled by sqrt(d_model) on its way in, to a root mean
    square of 0.3: large enough for the blocks to see, small enough that a token's own vector does not dominate its
    last hidden state. At 1 each token would expect itself, and the loss would start near sqrt(d_model).

    Sequences may be packed: `documents` numbers each token's document, and a token then sees its own document alone, as
    if it stood at the beginning.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise NapkinError("vocab_size is 0: give the model its tokenizer's vocab_size")
        self.config = config
        generator = torch.Generator().manual_seed(seed)
        parts = Composition(config, generator)
        width = config.mup_base_d_model or config.d_model
        head_std = config.init_std if config.init == "fixed" else _FIRST_LOGITS_STD * width**-0.5
        embedding_std = config.init_std if config.init == "fixed" else head_std if config.tie_embeddings else 1.0
        self.embedding = Embedding(config.vocab_size, config.d_model, std=embedding_std, generator=generator)
        self.input_scale = config.resolved_embedding_scale
        self.positions = parts.positions(embedding_std * self.input_scale)
        self.dropout = make_dropout(config.dropout)
        self.attend = parts.attention_form()
        self.blocks = nn.ModuleList(parts.block(layer, self.attend, self.positions) for layer in range(config.n_layers))
        self.run_block: Callable[..., Tensor] = _run_block
        """What calls a block: a trainer may have blocks computed again instead of keeping what they hold."""
        self.loss_chunk_size = CHUNK_SIZE
        """Tokens whose logits exist at one time in `loss`."""
        self.norm = parts.final_norm()
        # µP's other half: logits that grow neither with the width nor, as they learn, faster with it.
        self.output_scale = make_scale(width / config.d_model)
        self.head = (
            None
            if config.tie_embeddings
            else Linear(config.d_model, config.vocab_size, std=head_std, generator=generator)
        )

    def forward(self, tokens: Tokens, documents: Documents = None) -> Float[Tensor, "batch position vocab_size"]:
        """Logits of the token after each position."""
        return F.linear(self.hidden(tokens, documents), self.head_weight)

    def loss(self, tokens: Tokens, targets: Tokens, documents: Documents = None) -> Float[Tensor, ""]:
        """Mean cross-entropy in nats per token, where targets[b, t] follows tokens[b, t]; -1 does not count.

        In training what the config weighs is added: the head's z-loss and the losses of routers. The logits never all
        exist, see napkin.model.loss.
        """
        hidden = rearrange(self.hidden(tokens, documents), "b t c -> (b t) c")
        targets = rearrange(targets, "b t -> (b t)")
        chunk_size = self.loss_chunk_size
        if not self.training:
            return linear_cross_entropy(hidden, self.head_weight, targets, chunk_size=chunk_size)
        z_weight = self.config.z_weight
        loss = linear_cross_entropy(hidden, self.head_weight, targets, chunk_size=chunk_size, z_weight=z_weight)
        mixtures = self._mixtures()
        for mixture in mixtures:
            routing = mixture.take_routing()
            balance, z = self.config.balance_weight, self.config.router_z_weight
            loss = loss + (balance * routing.balance_loss + z * routing.z_loss) / len(mixtures)
        return loss

    def hidden(self, tokens: Tokens, documents: Documents = None) -> Float[Tensor, "batch position d_model"]:
        """The normalised hidden states that the head reads.

        Raises NapkinError for sequences beyond the config's context_length.
        """
        length, limit = tokens.shape[1], self.config.context_length
        if length > limit:
            raise NapkinError(
                f"a sequence of {length} tokens exceeds context_length {limit}: shorten it, or build the "
                f"model with context_length {length}"
            )
        x = self.dropout(self.positions.embed(self.embedding(tokens) * self.input_scale, documents))
        shared = Shared(
            rotation=self.positions.rotation(length),
            pairs=self.attend.prepare(self.positions, length, documents, tokens.device),
        )
        for block in self.blocks:
            x = self.run_block(block, x, shared)
        return self.output_scale(self.norm(x))

    def routings(self) -> list[Routing]:
        """What each router did in the last forward pass, first layer first; empty without experts."""
        return [mixture.take_routing().detach() for mixture in self._mixtures()]

    @property
    def head_weight(self) -> Float[Tensor, "vocab_size d_model"]:
        """The matrix that turns hidden states into logits; the embedding's own where they are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def _mixtures(self) -> list[MixtureOfExperts]:
        return [layer for layer in self.modules() if isinstance(layer, MixtureOfExperts)]


def _run_block(block: nn.Module, x: Tensor, shared: Shared) -> Tensor:
    return block(x, shared)
