"""x · weightᵀ + bias: torch's product, or a compiled loop for one vector, which is what one new token computes most."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from napkin.kernels.operators import cpu_operator, load_for_decoding, may_be_compiled
from napkin.kernels.threads import worker_threads

_SMALLEST_MATRIX = 2**18
"""Numbers of a matrix from which the compiled product is used; the products of smaller models are soon done."""
_SMALLEST_SHARED = 2**23
"""Numbers of a matrix, such as a head, from which the rows are divided among torch's number of threads: a millisecond
of reading, beside which it is short to wake one."""


def linear(
    x: Float[Tensor, "*batch in_features"],
    weight: Float[Tensor, "out_features in_features"],
    bias: Float[Tensor, " out_features"] | None = None,
) -> Float[Tensor, "*batch out_features"]:
    """x · weightᵀ + bias: torch's, but for one vector in inference on a CPU in bf16, where the matrix is large
    enough for the loop to be worth loading. Sums in fp32, result in bf16.

    The loop is an operator, which a meter sees: what is computed does not depend on whether it is metered.
    """
    # torch.compile cannot trace the question for inference mode, and is for training.
    if torch.compiler.is_compiling() or not may_be_compiled() or x.numel() != x.shape[-1] or not _suits(weight, x):
        return F.linear(x, weight, bias)
    return _multiply_vector(x, weight, bias)


def _suits(weight: Tensor, x: Tensor) -> bool:
    return (
        weight.dtype == x.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and weight.numel() >= _SMALLEST_MATRIX
        and weight.is_contiguous()
    )


@cpu_operator(
    "multiply_vector(Tensor input, Tensor weight, Tensor? bias) -> Tensor",
    lambda input, weight, bias: input.new_empty((*input.shape[:-1], len(weight))),
)
def _multiply_vector(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    load_for_decoding()
    from napkin.kernels.products.numba_products import matrix_vector

    n_rows, n_columns = weight.shape
    wide, result = x.float().contiguous(), torch.empty(*x.shape[:-1], n_rows)
    first, x_at, y_at = weight.data_ptr(), wide.data_ptr(), result.data_ptr()
    n_threads = torch.get_num_threads() if weight.numel() >= _SMALLEST_SHARED else 1
    ends = [n_rows * part // n_threads for part in range(n_threads + 1)]
    parts = [(first + 2 * n_columns * a, x_at, y_at + 4 * a, b - a, n_columns) for a, b in pairwise(ends)]
    others = [worker_threads(n_threads).submit(matrix_vector, *part) for part in parts[1:]]
    matrix_vector(*parts[0])
    for other in others:
        other.result()
    return (result if bias is None else result.add_(bias)).to(x.dtype)
