"""The protocol of a language model: what training, evaluation and generation use of a `Transformer`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor, nn

from napkin.model.moe import Routing

Tokens = Int[Tensor, "batch position"]
Documents = Int[Tensor, "batch position"] | None


@runtime_checkable
class LanguageModelConfig(Protocol):
    """The fields that are read of a model's config, a dataclass, so that checkpoints can store and compare it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    @property
    def dropout(self) -> float:
        """Probability of dropout; where it is above 0, recomputation restores the random state."""
        ...


class _HasAttributes(type(Protocol)):
    """`isinstance` asks the model for each attribute.

    A protocol's own check does not call `__getattr__` since Python 3.12, and there nn.Module looks up submodules.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, nn.Module) and all(
            hasattr(instance, name) for name in ("config", "blocks", "run_block", "loss", "hidden", "head_weight")
        )


@runtime_checkable
class LanguageModel(Protocol, metaclass=_HasAttributes):
    """An `nn.Module` that scores next tokens.

    Its `hidden` computes `x = self.run_block(block, x, ...)` for each of its `blocks`: activation checkpointing and
    compilation replace `run_block`, FSDP shards block by block. Muon orthogonalizes the matrices in `blocks`.
    """

    training: bool
    loss_chunk_size: int
    """Tokens whose logits exist at one time in `loss`; a model may ignore it."""
    run_block: Callable[..., Tensor]
    """Calls a block with its arguments and returns its output."""

    @property
    def config(self) -> LanguageModelConfig: ...

    @property
    def blocks(self) -> Any:
        """The layers that repeat, in an nn.ModuleList."""
        ...

    @property
    def head_weight(self) -> Float[Tensor, "vocab_size d_model"]:
        """The matrix that turns hidden states into logits."""
        ...

    def hidden(self, tokens: Tokens, documents: Documents = None) -> Float[Tensor, "batch position d_model"]:
        """The hidden states that the head reads."""
        ...

    def loss(self, tokens: Tokens, targets: Tokens, documents: Documents = None) -> Float[Tensor, ""]:
        """Mean loss in nats per token, where targets[b, t] follows tokens[b, t]; -1 does not count."""
        ...

    def routings(self) -> list[Routing]:
        """The choices of each router in the last forward pass, first layer first; empty without experts."""
        ...

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]: ...

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]: ...

    def train(self, mode: bool = True) -> Any: ...

    def eval(self) -> Any: ...

    def to(self, *args: Any, **kwargs: Any) -> Any: ...


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
