"""The language model: token ids in, a score for every possible next token out; and its loss in training, which is
cross-entropy with the head's z-loss and the losses of routers."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from napkin.errors import NapkinError
from napkin.kernels.attention.decode import Slots
from napkin.kernels.attention.reference import softcap
from napkin.kernels.loss.cross_entropy import CHUNK_SIZE, fused_linear_cross_entropy, linear_cross_entropy
from napkin.kernels.loss.distillation import Distillation, linear_distillation
from napkin.kernels.loss.log_probabilities import LinearScores, linear_log_probabilities
from napkin.kernels.operators import has_numbers
from napkin.kernels.products.linear import linear
from napkin.model.attention import ForwardContext, Preparation, SharedAttention, SharedKeysAndValues
from napkin.model.block import Block, Residual
from napkin.model.builder import ModelBuilder
from napkin.model.config import ModelConfig
from napkin.model.feed_forward import MixtureOfExperts, Routing
from napkin.model.kv_cache import CachedPass
from napkin.model.layers import Device, Embedding, Linear, default_device_and_dtype, make_dropout, make_scale

Tokens = Int[Tensor, "batch position"]
Documents = Int[Tensor, "batch position"] | None


# Hidden states have a root mean square of 1, so a head of std 0.3/sqrt(d_model) makes logits of std 0.3: the loss
# starts 0.3²/2 nats above ln(vocab_size), and the first steps have little to unlearn.
_FIRST_LOGITS_STD = 0.3


class TokenScores(NamedTuple):
    """The scores of some tokens, each given all before it."""

    log_probabilities: Float[Tensor, " token"]
    """Log-probability of each token, in nats."""
    entropies: Float[Tensor, " token"]
    """Entropy of the distribution that each token is drawn from, in nats."""
    scalars: Float[Tensor, " token"] | None
    """Output of the scalar head at the position before each token; None without one."""
    weighted_sum: Float[Tensor, ""] | None = None
    """coefficients · log_probabilities, where there were coefficients; then it alone has a gradient. With a teacher it
    is that of `linear_distillation`."""
    divergences: Float[Tensor, " token"] | None = None
    """Divergence from a teacher's distribution of each token, in nats; None without one."""


class Transformer(nn.Module):
    """A decoder-only Transformer, built as its config says; a `LanguageModel`.

    Its initial parameters are a pure function of config and seed, on torch's default device and in its default dtype
    unless others are given; torch's global random state is neither read nor changed. Matrices that write into the
    residual stream start smaller by 1/sqrt(2 · n_layers), so that the stream does not grow with depth (Radford et al.
    2019).

    A tied embedding starts as the head that it also is, and is multiplied by sqrt(d_model) as the input, to a root mean
    square of 0.3: large enough for the blocks to see, small enough that a token's own vector does not dominate its last
    hidden state. At 1 each token would predict itself, and the loss would start near sqrt(d_model).

    Sequences may be packed: `documents` numbers each token's document. A token then sees only its own document, which
    starts at position 0.
    """

    def __init__(
        self, config: ModelConfig, *, seed: int = 0, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise NapkinError("vocab_size is 0: give the model its tokenizer's vocab_size")
        self.config = config
        with default_device_and_dtype(device, dtype):
            generator = torch.Generator().manual_seed(seed)
            builder = ModelBuilder(config, generator)
            width = config.mup_base_d_model or config.d_model
            head_std = config.init_std if config.init == "fixed" else _FIRST_LOGITS_STD * width**-0.5
            embedding_std = config.init_std if config.init == "fixed" else head_std if config.tie_embeddings else 1.0
            self.embedding: Any = Embedding(config.vocab_size, config.d_model, std=embedding_std, generator=generator)
            self.input_scale = config.resolved_embedding_scale
            self.positions = builder.positions(embedding_std * self.input_scale)
            self.dropout = make_dropout(config.dropout)
            self.blocks = nn.ModuleList(
                builder.block(layer, attend, self.positions)
                for layer, attend in enumerate(builder.attention_implementations())
            )
            self.run_block: Callable[..., Tensor] = _run_block
            """Calls a block; activation checkpointing and compilation replace it."""
            self.loss_chunk_size = CHUNK_SIZE
            """Number of tokens whose logits exist at one time in `loss`."""
            self.next_token_loss: Callable[..., Tensor] = next_token_loss
            """The loss of hidden states; tensor parallelism replaces it."""
            self.linear_log_probabilities: Callable[..., LinearScores] = linear_log_probabilities
            """The log-probabilities of hidden states' next tokens; compiled kernels replace it."""
            self.norm = builder.final_norm()
            # µP's output multiplier: neither the logits nor how fast they learn grow with the width.
            self.output_scale = make_scale(width / config.d_model)
            self.head = (
                None
                if config.tie_embeddings
                else Linear(config.d_model, config.vocab_size, std=head_std, generator=generator)
            )
            self.decode_blocks: Any = None
            """A `napkin.model.compiled_blocks.CompiledBlocks` that computes the blocks for new tokens, or all of the
            model, in one compiled pass; it may decline."""
            self.quantized_head: Any = None
            """A `napkin.model.quantized.Int8Linear` that multiplies in place of the head."""
            self.scalar_head: Linear | None = None
            """Turns hidden states into one number each: values, or rewards; see `add_scalar_head`."""

    def forward(self, tokens: Tokens, documents: Documents = None) -> Float[Tensor, "batch position vocab_size"]:
        """Logits of the token after each position."""
        return self.logits_of(self.hidden(tokens, documents))

    def logits_of(self, hidden: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch vocab_size"]:
        """The logits of hidden states that the head reads, in their dtype."""
        cap = self.config.logit_softcap
        if self.quantized_head is not None:
            logits = self.quantized_head(hidden)
        else:
            logits = linear(hidden, self.head_weight.to(hidden.dtype))
        return logits if cap is None else softcap(logits, cap)

    def loss(self, tokens: Tokens, targets: Tokens, documents: Documents = None) -> Float[Tensor, ""]:
        """Mean cross-entropy in nats per token, where targets[b, t] follows tokens[b, t]; -1 does not count.

        In training the head's z-loss and the routers' losses are added, weighted by the config. The logits never all
        exist at once, see napkin.kernels.loss.cross_entropy.
        """
        return self.add_router_losses(self.loss_of(self.hidden(tokens, documents), targets), self.blocks)

    def add_router_losses(
        self, loss: Float[Tensor, ""], blocks: nn.Module, n_routers: int | None = None
    ) -> Float[Tensor, ""]:
        """The loss and, in training, the mean of the routers' losses in those blocks; `n_routers` is how many the model
        has, None is how many these have."""
        if not self.training:
            return loss
        routings = [mixture.take_routing() for mixture in mixtures(blocks)]
        balance_weight, z_weight = self.config.balance_weight, self.config.router_z_weight
        for routing in routings:
            weighted = balance_weight * routing.balance_loss + z_weight * routing.z_loss
            loss = loss + weighted / (n_routers or len(routings))
        return loss

    def loss_of(
        self,
        hidden: Float[Tensor, "batch position d_model"],
        targets: Tokens,
        head_weight: Float[Tensor, "vocab_size d_model"] | None = None,
    ) -> Float[Tensor, ""]:
        """`loss` of the hidden states that the head reads, without the routers' losses; None is the model's head."""
        head_weight = self.head_weight if head_weight is None else head_weight
        return self.next_token_loss(
            hidden,
            head_weight,
            targets,
            chunk_size=self.loss_chunk_size,
            z_weight=self.config.z_weight if self.training else 0.0,
            logit_softcap=self.config.logit_softcap,
        )

    def token_scores(
        self,
        tokens: Tokens,
        places: Int[Tensor, " token"],
        targets: Int[Tensor, " token"],
        documents: Documents = None,
        coefficients: Float[Tensor, " token"] | None = None,
        distillation: Distillation | None = None,
        *,
        temperature: float = 1.0,
    ) -> TokenScores:
        """The scores of some targets; the loss is up to others.

        targets[i] follows the token at places[i], an index into the tokens row by row. Logits are divided by
        `temperature`. As in `loss`, they never all exist at once. If a loss's gradient with respect to the
        log-probabilities is known beforehand, pass it as `coefficients`: the loss is then their weighted sum, and a
        quarter of the head's products is saved. With a `distillation` the temperature of scores is 1.
        """
        hidden = rearrange(self.hidden(tokens, documents), "b t c -> (b t) c").index_select(0, places)
        if distillation is not None:
            scores = linear_distillation(
                hidden,
                self.head_weight,
                targets,
                distillation,
                coefficients,
                chunk_size=self.loss_chunk_size,
                logit_softcap=self.config.logit_softcap,
            )
            return TokenScores(
                scores.log_probabilities, scores.entropies, None, scores.weighted_sum, scores.divergences
            )
        log_probabilities, entropies, weighted_sum = self.linear_log_probabilities(
            hidden,
            self.head_weight,
            targets,
            coefficients,
            temperature=temperature,
            chunk_size=self.loss_chunk_size,
            logit_softcap=self.config.logit_softcap,
        )
        # Not a view: FSDP2 hooks into what a module returns.
        scalars = None if self.scalar_head is None else self.scalar_head(hidden)[:, 0].float().clone()
        return TokenScores(log_probabilities, entropies, scalars, weighted_sum)

    def hidden(
        self, tokens: Tokens, documents: Documents = None, *, cache: CachedPass | None = None
    ) -> Float[Tensor, "batch position d_model"]:
        """The normalized hidden states that the head reads.

        With a `cache` the tokens are new ones of sequences whose earlier keys and values it holds; it then also knows
        their documents. Raises NapkinError for sequences longer than the config's context_length.
        """
        if cache is not None:
            return self._hidden_cached(tokens, cache)
        length, limit = tokens.shape[1], self.config.context_length
        if length > limit:
            raise NapkinError(
                f"a sequence of {length} tokens exceeds context_length {limit}: shorten it, or build the "
                f"model with context_length {length}"
            )
        return self.normalized(self.through(self.blocks, self.embed(tokens, documents), tokens, documents))

    def embed(self, tokens: Tokens, documents: Documents = None) -> Residual:
        """The residual stream as the first block reads it."""
        return self.dropout(self.positions.embed(self.embedding(tokens) * self.input_scale, documents))

    def through(
        self, blocks: Iterable[nn.Module], x: Residual, tokens: Tokens, documents: Documents = None
    ) -> Residual:
        """The residual stream of those tokens after some of the blocks."""
        length = tokens.shape[1]
        rotation = self.positions.rotation(length)
        contexts: dict[Preparation, ForwardContext] = {}
        group: SharedKeysAndValues | None = None
        for block in blocks:
            shared = cast(Block, block).preparation
            if shared not in contexts:
                mask = shared.prepare(self.positions, length, documents, tokens.device)
                contexts[shared] = ForwardContext(rotation, mask)
            context = contexts[shared]
            if self.config.kv_sharing > 1:
                # One for each group: recomputation in the backward pass reads it again.
                group = group if reads_shared(block) else SharedKeysAndValues()
                context = replace(context, shared=group)
            x = self.run_block(block, x, context)
        return x

    def _hidden_cached(self, tokens: Tokens, cache: CachedPass) -> Float[Tensor, "batch position d_model"]:
        x = self.positions.embed(self.embedding(tokens) * self.input_scale, None, cache.document_positions)
        start, n_new = cache.start, tokens.shape[1]
        rotation = (
            self.positions.rotation_at(cache.positions)
            if start is None
            else self.positions.rotation(start + n_new, query_offset=start)
        )
        if self.decode_blocks is not None and (decoded := self.decode_blocks(self, x, rotation, cache)) is not None:
            return self.normalized(decoded)
        masks: dict[Preparation, Any] = {}
        keys_and_values = None
        for index, (block, layer) in enumerate(zip(self.blocks, self.config.kv_sources, strict=True)):
            shared = cast(Block, block).preparation
            if self.config.kv_sharing > 1 and layer == index:
                keys_and_values = SharedKeysAndValues()
            if shared not in masks:
                masks[shared] = shared.prepare_cached(self.positions, cache, layer)
            mask = masks[shared]
            if isinstance(mask, Slots):
                mask = replace(mask, scales=cache.scales(layer))
            x = self.run_block(block, x, ForwardContext(rotation, mask, cache, layer, keys_and_values))
        return self.normalized(x)

    def normalized(self, x: Residual) -> Float[Tensor, "batch position d_model"]:
        """The hidden states that the head reads, of the last block's residual stream."""
        return self.output_scale(self.norm(x))

    def routings(self) -> list[Routing]:
        """The choices of each router in the last forward pass, first layer first; empty without experts."""
        return [mixture.take_routing().detach() for mixture in mixtures(self)]

    @property
    def device(self) -> torch.device:
        """The device of its parameters."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the head's products."""
        return self.head_weight.dtype if self.quantized_head is None else self.quantized_head.dtype

    @property
    def head_weight(self) -> Float[Tensor, "vocab_size d_model"]:
        """The matrix that turns hidden states into logits; if they are tied, the embedding's."""
        if self.quantized_head is not None:
            return self.quantized_head.weight
        return self.embedding.weight if self.head is None else self.head.matrix


def next_token_loss(
    hidden: Float[Tensor, "batch position d_model"],
    head_weight: Float[Tensor, "vocab_size d_model"],
    targets: Int[Tensor, "batch position"],
    *,
    chunk_size: int,
    z_weight: float = 0.0,
    logit_softcap: float | None = None,
    compiled: bool = False,
) -> Float[Tensor, ""]:
    """Mean cross-entropy in nats per token, targets of -1 ignored, plus z_weight · mean(logsumexp(logits)²).

    At most chunk_size rows of logits exist at a time; they are bounded by a softcap if there is one. `compiled` is as
    in `linear_cross_entropy`.
    """
    rows, ids = rearrange(hidden, "b t c -> (b t) c"), rearrange(targets, "b t -> (b t)")
    if not torch.is_grad_enabled():
        rows, ids = _counted(rows, ids)
    return linear_cross_entropy(
        rows,
        head_weight,
        ids,
        chunk_size=chunk_size,
        z_weight=z_weight,
        logit_softcap=logit_softcap,
        compiled=compiled,
    )


def _counted(
    hidden: Float[Tensor, "row d_model"], targets: Int[Tensor, " row"]
) -> tuple[Float[Tensor, "counted d_model"], Int[Tensor, " counted"]]:
    """The rows whose targets count: half of them where windows overlap by half. Elsewhere than on a CPU all rows, since
    the host would wait to know how many count."""
    if hidden.device.type != "cpu" or not has_numbers(hidden):
        return hidden, targets
    counts = targets != -1
    return (hidden, targets) if counts.all() else (hidden[counts], targets[counts])


def fused_next_token_loss(
    hidden: Float[Tensor, "batch position d_model"],
    head_weight: Float[Tensor, "vocab_size d_model"],
    targets: Int[Tensor, "batch position"],
    *,
    chunk_size: int,
    z_weight: float = 0.0,
    logit_softcap: float | None = None,
    narrow_weight: Float[Tensor, "vocab_size d_model"] | None = None,
) -> Float[Tensor, ""]:
    """`next_token_loss` by `fused_linear_cross_entropy`."""
    return fused_linear_cross_entropy(
        rearrange(hidden, "b t c -> (b t) c"),
        head_weight,
        rearrange(targets, "b t -> (b t)"),
        chunk_size=chunk_size,
        z_weight=z_weight,
        logit_softcap=logit_softcap,
        narrow_weight=narrow_weight,
    )


def mixtures(module: nn.Module) -> list[MixtureOfExperts]:
    """The mixtures of experts within a module, first layer first."""
    return [layer for layer in module.modules() if isinstance(layer, MixtureOfExperts)]


def reads_shared(block: nn.Module) -> bool:
    """True for a block whose attention has the keys and values of an earlier one."""
    return isinstance(getattr(block, "attention", None), SharedAttention)


def _run_block(block: nn.Module, x: Tensor, context: ForwardContext) -> Tensor:
    return block(x, context)


def add_scalar_head(model: Transformer) -> None:
    """Give a model a head that turns hidden states into one number, which starts at 0 everywhere."""
    weight = model.head_weight
    head = Linear(
        model.config.d_model, 1, bias=True, generator=torch.Generator(), device=weight.device, dtype=weight.dtype
    )
    with torch.no_grad():
        head.weight.zero_()
    model.scalar_head = head


class _HasAttributes(type(Protocol)):
    """Makes `isinstance` check each attribute with `hasattr`. Since Python 3.12 a protocol's own check does not call
    `__getattr__`, by which nn.Module finds submodules.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, nn.Module) and all(
            hasattr(instance, name) for name in ("config", "blocks", "run_block", "loss", "hidden", "head_weight")
        )


@runtime_checkable
class LanguageModel(Protocol, metaclass=_HasAttributes):
    """An `nn.Module` that scores next tokens: what training, evaluation and generation use of a `Transformer`.

    Its `config` is a dataclass, which checkpoints store and compare, with vocab_size, context_length and dropout. Its
    `hidden` computes `x = self.run_block(block, x, ...)` for each of its `blocks`, in an nn.ModuleList: activation
    checkpointing and compilation replace `run_block`, FSDP shards block by block. Muon orthogonalizes the matrices in
    `blocks`. `loss_chunk_size` is how many tokens' logits exist at one time in `loss`; a model may ignore it.
    """

    training: bool
    loss_chunk_size: int
    run_block: Callable[..., Tensor]

    @property
    def config(self) -> Any: ...

    @property
    def blocks(self) -> Any: ...

    @property
    def head_weight(self) -> Float[Tensor, "vocab_size d_model"]: ...

    def hidden(self, tokens: Tokens, documents: Documents = None) -> Float[Tensor, "batch position d_model"]: ...

    def loss(self, tokens: Tokens, targets: Tokens, documents: Documents = None) -> Float[Tensor, ""]: ...

    def routings(self) -> list[Routing]: ...

    def train(self, mode: bool = True) -> Any: ...


@runtime_checkable
class HasModes(Protocol):
    """A thing with a training mode and an evaluation mode, such as any `nn.Module`."""

    training: bool

    def train(self, mode: bool = True) -> Any: ...


@contextmanager
def evaluation_mode(model: HasModes) -> Iterator[None]:
    """Put a model into evaluation mode, without dropout and with cross-entropy alone as its loss, and back."""
    training = model.training
    model.train(False)
    try:
        yield
    finally:
        model.train(training)
