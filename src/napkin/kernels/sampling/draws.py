"""Drawing tokens on a CPU in compiled loops, a row of logits on each thread: `numba_draws.py`."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from napkin.kernels.operators import has_numbers, is_computed, on_threads

Logits = Float[Tensor, "row vocab_size"]
Settings = Float[Tensor, "row 5"]
"""Temperature above 0, top_k, top_p, min_p and a number from 0 to 1 for each row, in float64; infinity is no top_k."""


def are_compiled(logits: Tensor) -> bool:
    """True if the compiled loops take those logits."""
    return logits.dtype == torch.float32 and is_computed(logits) and has_numbers(logits)


def drawn_rows(logits: Logits, settings: Settings) -> tuple[Int[Tensor, " row"], Float[Tensor, " row"]]:
    """A token for each row, and the log-probability with which it was drawn; the token is -1 where a logit is infinite
    or NaN. With a top_k of 1 it is the first of the largest logits."""
    n_rows, n = logits.shape
    tokens, logprobs = torch.empty(n_rows, dtype=torch.int64), torch.empty(n_rows, dtype=torch.float64)
    _on_threads("draw_rows", logits, (logits, settings, tokens, logprobs), 3 * n)
    return tokens, logprobs


def row_probabilities(logits: Logits, settings: Settings) -> tuple[Float[Tensor, "row vocab_size"], bool]:
    """The probabilities with which `drawn_rows` draws each token, in float64, and False if a logit is infinite or
    NaN."""
    probabilities = torch.empty(logits.shape, dtype=torch.float64)
    finite = torch.empty(len(logits), dtype=torch.int64)
    _on_threads("probability_rows", logits, (logits, settings, probabilities, finite), logits.shape[1])
    return probabilities, bool(finite.all())


def _on_threads(kernel: str, logits: Tensor, before: tuple[Tensor, ...], buffer_size: int) -> None:
    # What is compiled is imported with the first draw.
    from napkin.kernels.sampling.numba_draws import BUCKETS

    n_rows, n = logits.shape
    on_threads(
        f"sampling.numba_draws.{kernel}",
        before,
        (n,),
        n_rows=n_rows,
        n_columns=n,
        buffer_size=buffer_size + 4 * BUCKETS,
    )
