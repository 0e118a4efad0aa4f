"""Napkin mathematics: closed forms that a person can do by hand, each with its source and its known error.

N is a number of parameters, T of tokens; results are FLOPs, bytes or seconds. `count` says how far off each is.
"""


def parameters_rule(*, vocab_size: int, d_model: int, n_layers: int, tied: bool) -> int:
    """Parameters of a Transformer: 12·L·d² for the blocks and V·d for each embedding table.

    Kaplan et al. 2020, "Scaling Laws for Neural Language Models", table 1 (which leaves the embedding out). Exact for
    multi-head attention with a feed-forward layer of 4·d, or a gated one of 8/3·d, up to rounding, norms and biases.
    """
    return 12 * n_layers * d_model**2 + (1 if tied else 2) * vocab_size * d_model


def training_flops_rule(parameters: float, tokens: float) -> float:
    """FLOPs to train on `tokens`: 6·N·T, of which 2·N·T are the forward pass.

    Kaplan et al. 2020, section 2.1. Leaves attention's products of activations out: 13% under for GPT-2 small at 1,024
    tokens, up to 4 × at long context. Counts layers without an input gradient as if they had one: 20% over for a deep
    linear model. An untied input embedding does no product, yet is counted.
    """
    return 6 * parameters * tokens


def adamw_bytes_rule(parameters: float, *, bytes_a_parameter: int = 16) -> float:
    """Bytes to train with AdamW in fp32: 16 a parameter (weight, gradient and two moments at 4 each).

    Rajbhandari et al. 2020, "ZeRO", section 3.1 (where mixed precision comes to 16 as 2 + 2 + 12). Leaves activations
    out: 27% under the true peak of a GPT-2-small step at batch 1, many times under for small models and large batches.
    """
    return bytes_a_parameter * parameters


def seconds_rule(flops: float, peak_flops_per_second: float, *, mfu: float = 0.5) -> float:
    """Seconds to do `flops` on devices of that dense peak at a model-FLOPs utilisation.

    Chowdhery et al. 2022, "PaLM", appendix B, solved for time. An MFU of 0.5 is good on a cluster; small models on a
    CPU reach less.
    """
    return flops / (peak_flops_per_second * mfu)
