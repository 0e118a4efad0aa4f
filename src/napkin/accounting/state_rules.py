"""Napkin mathematics of layers that carry a state: parameters, FLOPs, kept bytes and the state's bytes in closed form.

The letters: d is the width of the model; h heads of p numbers are w = h·p numbers wide; g groups of heads share keys
and queries of n numbers; a convolution sees k tokens of u = w + 2·g·n channels; a scan goes by chunks of Q tokens. The
layer and its scan are those of Dao & Gu 2024, "Transformers are SSMs", sections 6 and 7.
"""

from dataclasses import dataclass

from napkin.kernels.recurrences import CHUNK


@dataclass(frozen=True, kw_only=True)
class StateSizes:
    """The sizes of a model's layers with a state, of which each has these."""

    n_layers: int
    d_model: int
    n_heads: int
    head_dim: int
    n_groups: int
    state_size: int
    conv_width: int
    delta: bool = False
    """True if they are of the gated delta rule, False if they are Mamba-2's."""

    @property
    def width(self) -> int:
        """Numbers of the values of a token."""
        return self.n_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.width + 2 * self.n_groups * self.state_size


def state_parameters_rule(sizes: StateSizes) -> int:
    """Parameters of one layer: d·(w + u + h) into it, w·d out of it, and filters of k·u; a delta rule has d·h more.

    Dao & Gu 2024, section 7; Yang et al. 2024. Only vectors are missing, of norms, biases, steps, decays and skips:
    0.13% under for Mamba-2 130M.
    """
    per_head = 2 if sizes.delta else 1
    matrices = sizes.d_model * (2 * sizes.width + sizes.channels + per_head * sizes.n_heads)
    return matrices + sizes.conv_width * sizes.channels


def scan_flops_rule(sizes: StateSizes, *, context_length: int, tokens: float) -> float:
    """FLOPs that the scans of all layers add to 6·N·T: per token and layer 2·(4·Q·g·n + 3·Q·w + 7·n·w).

    Dao & Gu 2024, section 6. Of these Q·(g·n + w) + 2·n·w products are the forward pass, over all pairs of a chunk; the
    backward pass computes scores, weights and what is read of the states again. The last chunk is as long as the
    others. Of a delta rule (Yang et al. 2024) it is 2·(8·Q·h·n + 5·Q·w + 9·n·w), with the triangular systems, and
    8·Q·n·w less per sequence: no gradient goes beyond its first state or comes from its last. Exact.
    """
    chunk = min(CHUNK, context_length)
    computed = -(-context_length // chunk) * chunk / context_length * tokens
    if sizes.delta:
        keys = sizes.n_heads * sizes.state_size
        products = 8 * chunk * keys + 5 * chunk * sizes.width + 9 * sizes.state_size * sizes.width
        ends = 8 * chunk * sizes.state_size * sizes.width * tokens / context_length
        return sizes.n_layers * (2 * products * computed - ends)
    keys = sizes.n_groups * sizes.state_size
    products = 4 * chunk * keys + 3 * chunk * sizes.width + 7 * sizes.state_size * sizes.width
    return 2 * sizes.n_layers * products * computed


def state_bytes_rule(sizes: StateSizes, *, bytes_per_number: int = 2) -> int:
    """Bytes that all layers keep of a sequence that is generated, however long it is: L·(4·n·w + (k-1)·u·b).

    Dao & Gu 2024, section 7. The sums are in fp32, the inputs of the convolution in the format of the weights. Exact.
    """
    inputs = (sizes.conv_width - 1) * sizes.channels * bytes_per_number
    return sizes.n_layers * (4 * sizes.state_size * sizes.width + inputs)


def state_kept_bytes_rule(sizes: StateSizes, *, context_length: int, tokens: float) -> float:
    """Bytes that one layer and the norm before it keep for the backward pass, in fp32: 4·(d + 6·w + 3·u + 4·h + n·w/Q)
    per token.

    Of the layer of Dao & Gu 2024: what it reads, the products of its first matrix, the convolution before and after
    SiLU, steps, values, outputs, the gate after SiLU, what it gates and its norm, and a state per chunk; of several
    groups the norm before its gain too, w more. 0.2% under at a width of 128: two norms keep a number per token more,
    the convolution k - 1 tokens per sequence. Where chunks do not divide the context, 18% under at 96 tokens: padded
    copies are kept.
    """
    chunk = min(CHUNK, context_length)
    states = sizes.state_size * sizes.width / chunk
    widths = 6 if sizes.n_groups == 1 else 7
    vectors = sizes.d_model + widths * sizes.width + 3 * sizes.channels + 4 * sizes.n_heads
    return 4 * (vectors + states) * tokens
