"""Estimates of the divergence KL(pi ‖ reference) from tokens that pi has drawn (Schulman 2020, "Approximating KL").

With d = log pi(token) - log reference(token):

    estimate   value            bias and variance            expected gradient
    k1         d                unbiased, large              that of KL(pi ‖ reference)
    k2         d² / 2           biased, small                that of KL(pi ‖ reference)
    k3         exp(-d) - 1 + d  unbiased, small, never < 0   that of KL(reference ‖ pi)

The derivative of k1's own value is 0 in expectation, and would be noise as a penalty. Its gradient here is therefore
that of a reward of -d, d · grad log pi, which is also k2's; all three are in Tang & Munos 2025.
"""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

Tokens = Float[Tensor, " token"]


def divergence_terms(
    log_probabilities: Tokens, reference_log_probabilities: Tokens, estimator: Literal["k1", "k2", "k3"]
) -> Tokens:
    """An estimate of the divergence at each token, in nats; values and gradients are those of the table above."""
    difference = log_probabilities - reference_log_probabilities
    if estimator == "k3":
        return (-difference).exp() - 1 + difference
    half_square = difference.square() / 2
    return half_square if estimator == "k2" else half_square + (difference - half_square).detach()
