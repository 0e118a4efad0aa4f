"""The shape of a model: every size that can be chosen, checked once, before anything is allocated."""

from dataclasses import dataclass

from napkin.errors import NapkinError


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a decoder-only Transformer.

    Raises NapkinError where the sizes cannot be one model.
    """

    vocab_size: int = 0
    """Number of token ids; 0 is as many as the tokenizer has, which training fills in."""

    context_length: int = 256
    """Most tokens a sequence may hold. 256 is a paragraph, and keeps attention below a tenth of the FLOPs."""

    d_model: int = 256
    """Width of the residual stream, in numbers a token. 256 trains in minutes on a laptop's CPU."""

    n_layers: int = 4
    """Number of blocks, each one attention and one feed-forward. 4 is enough to be worth watching learn."""

    n_heads: int = 4
    """Number of query heads; d_model is divided among them. 4 makes heads of 64, the usual size."""

    n_kv_heads: int | None = None
    """Number of key and value heads, shared by groups of query heads (Ainslie et al. 2023); None is n_heads.
    Fewer shrink the KV cache of inference, which a small model does not need."""

    d_ff: int | None = None
    """Width of the feed-forward layer; None is 8/3 · d_model, rounded up to a multiple of 32: with its three
    matrices SwiGLU then has the parameters of the plain 4 · d_model layer (Shazeer 2020), in shapes that fill
    matrix units."""

    rope_theta: float = 10000.0
    """Base of the rotary wavelengths, which run from 2π to nearly 2π · rope_theta tokens. 10000 (Su et al. 2021)
    suits contexts up to about 8192; longer ones want more."""

    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm so that an all-zero vector stays finite. 1e-5 is far below any mean
    square met in training."""

    tie_embeddings: bool = True
    """Whether input embedding and output head are one matrix (Press & Wolf 2017). In a small model a second
    one would hold a good part of all parameters and learn little that the first did not."""

    def __post_init__(self) -> None:
        self._refuse_non_positive()
        if self.d_model % self.n_heads:
            raise NapkinError(
                f"d_model {self.d_model} does not divide into n_heads {self.n_heads}: use d_model "
                f"{_round_up(self.d_model, self.n_heads)} or another n_heads"
            )
        if self.head_dim % 2:
            raise NapkinError(
                f"d_model {self.d_model} over n_heads {self.n_heads} makes heads of {self.head_dim}, rotary "
                f"positions need an even number: use d_model {self.n_heads * (self.head_dim + 1)}"
            )
        if self.n_heads % self.resolved_n_kv_heads:
            raise NapkinError(
                f"n_heads {self.n_heads} does not divide into n_kv_heads {self.resolved_n_kv_heads} groups: use "
                f"a divisor of {self.n_heads}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.d_model // self.n_heads

    @property
    def resolved_n_kv_heads(self) -> int:
        """n_kv_heads, its default filled in. The field keeps its None, so that a changed copy resolves anew."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def resolved_d_ff(self) -> int:
        """d_ff, its default filled in."""
        return _round_up(-(-8 * self.d_model // 3), 32) if self.d_ff is None else self.d_ff

    def _refuse_non_positive(self) -> None:
        for name, value in vars(self).items():
            if value is None or isinstance(value, bool) or (name == "vocab_size" and value == 0):
                continue
            # A negated comparison catches NaN too.
            if not value > 0:
                raise NapkinError(f"{name} is {value}: use a number above 0")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
