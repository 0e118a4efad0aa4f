"""Napkin mathematics: closed forms that can be computed by hand, each with its source and its known error.

N is the number of parameters, T that of tokens; results are FLOPs, bytes or seconds. The errors given here were found
by comparing with `count`.
"""

from typing import Literal

from napkin.optim.registry import optimizer_entry


def parameters_rule(*, vocab_size: int, d_model: int, n_layers: int, tied: bool) -> int:
    """Parameters of a Transformer: 12·L·d² for the blocks and V·d for each embedding table.

    Kaplan et al. 2020, "Scaling Laws for Neural Language Models", table 1 (which leaves the embedding out). For
    multi-head attention with a feed-forward layer of 4·d, or a gated one of 8/3·d, only norms, biases and learned
    positions are missing: 0.73% under for GPT-2 small. Grouped queries need fewer: 7.6% over for a Llama-like 125 M.
    """
    return 12 * n_layers * d_model**2 + (1 if tied else 2) * vocab_size * d_model


def gated_parameters_rule(
    *, vocab_size: int, d_model: int, n_layers: int, d_ff: int, n_heads: int, n_kv_heads: int, tied: bool
) -> int:
    """Parameters of a Llama-like Transformer: L·d·(2·d + 2·d·kv/h + 3·d_ff) and V·d for each embedding table.

    Touvron et al. 2023, "Llama 2", and Ainslie et al. 2023 for grouped queries. Only the norms are missing: 0.015%
    under at 125 M, 0.003% under at 13 B.
    """
    attention = 2 * d_model**2 + 2 * d_model * (d_model * n_kv_heads // n_heads)
    return n_layers * (attention + 3 * d_model * d_ff) + (1 if tied else 2) * vocab_size * d_model


def layered_parameters_rule(
    *,
    vocab_size: int,
    d_model: int,
    n_layers: int,
    d_ff: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    tied: bool,
    gated: bool = True,
    n_experts: int = 0,
    n_routed: int = 0,
    d_expert: int = 0,
    n_dense_layers: int = 0,
    positions: int = 0,
) -> int:
    """Parameters of any model of attention and feed-forward layers, by what its layers are.

    V·d for each embedding table, p·d for p learned positions, and per layer 2·d·c·(h + kv) for heads of width c, and
    3·d·ff, or 2·d·ff without a gate. Where experts of width e take the place of a feed-forward layer, 3·d·e for each of
    them, and d for each that is routed to. With the experts that a token uses as `n_experts`, the result is the
    parameters that it uses.

    Touvron et al. 2023, "Llama 2"; Ainslie et al. 2023 for grouped queries; Dai et al. 2024, "DeepSeekMoE", for
    experts. Norms and biases are missing: 0.098% under for GPT-2 small, 0.015% under for a Llama-like 125 M.
    """
    attention = 2 * d_model * head_dim * (n_heads + n_kv_heads)
    matrices = 3 if gated else 2
    dense = n_dense_layers if n_experts else n_layers
    routed = (n_layers - dense) * d_model * (n_experts * matrices * d_expert + n_routed)
    tables = (1 if tied else 2) * vocab_size + positions
    return n_layers * attention + dense * matrices * d_model * d_ff + routed + tables * d_model


def matmul_flops_rule(m: int, k: int, n: int) -> int:
    """FLOPs of [m, k] · [k, n]: 2·m·k·n, a multiplication and an addition for each triple.

    Exact if the first addition, to zero, is counted.
    """
    return 2 * m * k * n


def forward_flops_rule(parameters: float, tokens: float) -> float:
    """FLOPs of a forward pass: 2·N·T, one multiplication and one addition per parameter and token.

    Kaplan et al. 2020, section 2.1. Errors as for `training_flops_rule`.
    """
    return 2 * parameters * tokens


def backward_flops_rule(parameters: float, tokens: float) -> float:
    """FLOPs of a backward pass: 4·N·T, the gradients of both factors of each product.

    Kaplan et al. 2020, section 2.1. The first layer needs no gradient of its input: 33% over for a deep linear model of
    two layers.
    """
    return 4 * parameters * tokens


def training_flops_rule(parameters: float, tokens: float) -> float:
    """FLOPs to train on `tokens`: 6·N·T, of which 2·N·T are the forward pass.

    Kaplan et al. 2020, section 2.1. Leaves out attention's products of activations: 13% under for GPT-2 small at 1,024
    tokens, 68% under at 16,384. Counts an input gradient for the first layer too: 20% over for a deep linear model of
    two layers. Counts an untied input embedding, which is no matrix product: 5% over for a Llama-like 125 M.
    """
    return 6 * parameters * tokens


def attention_flops_rule(*, n_layers: int, d_model: int, context_length: int, tokens: float) -> float:
    """FLOPs that attention adds to 6·N·T: 12·L·d·context per token, over all pairs; causal pairs alone are half.

    Chowdhery et al. 2022, "PaLM", appendix B, where d = heads · head width. Exact for attention alone; 6·N·T + this is
    0.6% over for GPT-2 small at 1,024 tokens, and 21% over for a Llama-like 125 M whose untied embedding N includes.
    """
    return 12 * n_layers * d_model * context_length * tokens


def adamw_bytes_rule(parameters: float, *, bytes_per_parameter: int = 16) -> float:
    """Bytes to train with AdamW in fp32: 16 per parameter (weight, gradient and two moments at 4 each).

    Rajbhandari et al. 2020, "ZeRO", section 3.1 (where mixed precision comes to 16 as 2 + 2 + 12). Leaves out
    activations: 27% under the true peak of a GPT-2-small step at batch 1, a small fraction of it for small models with
    large batches.
    """
    return bytes_per_parameter * parameters


def bytes_per_parameter(optimizer: str, *, mixed: bool = False) -> int:
    """Bytes per parameter for weight, gradient and the state of an optimizer, by its name in a recipe.

    In fp32, 4 for each: 8 for sgd, 12 with one moment (momentum, adagrad), 16 with two (adamw). `mixed` is the scheme
    of Rajbhandari et al. 2020, "ZeRO", section 3.1: weight and gradient in 2 bytes, an fp32 master copy, state in fp32.
    Autocast, which keeps fp32 weights and gradients, is not `mixed` in that sense. Errors as for `adamw_bytes_rule`.

    Raises NapkinError for an unknown optimizer.
    """
    return (2 + 2 + 4 if mixed else 4 + 4) + optimizer_entry(optimizer).state_bytes


def largest_model_rule(memory_bytes: float, *, bytes_per_parameter: int = 16) -> float:
    """Parameters that fill a memory, which may be that of several devices together.

    `adamw_bytes_rule` solved for N, with its errors: activations need memory too.
    """
    return memory_bytes / bytes_per_parameter


def activation_bytes_rule(
    *,
    batch_size: int,
    context_length: int,
    d_model: int,
    n_heads: int,
    form: Literal["plain", "flash", "checkpointed"] = "flash",
) -> int:
    """Bytes that one GPT block keeps for its backward pass, in 16 bits: s·b·h·(34 + 5·a·s/h).

    Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equations 2 and 6: flash
    attention, which stores no scores, keeps 34·s·b·h; checkpointing the block's input keeps 2·s·b·h, which is exact.
    Dropout's masks are 2 of the 34 and 1 of the 5: 6% over for a block of GPT-2 XL without dropout, 12% over with plain
    attention.
    """
    one = context_length * batch_size * d_model
    scores = 5 * n_heads * context_length**2 * batch_size
    return {"plain": 34 * one + scores, "flash": 34 * one, "checkpointed": 2 * one}[form]


def compute_optimal_tokens_rule(parameters: float) -> float:
    """Tokens to train N parameters on for the lowest loss with a given budget of FLOPs: 20·N.

    Hoffmann et al. 2022, "Chinchilla", table 3, rounded: 1% under their figure at 1 B parameters, 11% under at 67 B.
    A step does not show it, and models that are used a lot are trained on many times more.
    """
    return 20 * parameters


def seconds_rule(flops: float, peak_flops_per_second: float, *, mfu: float = 0.5) -> float:
    """Seconds to compute `flops` on devices of that dense peak at a model-FLOPs utilisation.

    Chowdhery et al. 2022, "PaLM", appendix B, solved for time. An MFU of 0.5 is good on a cluster; small models on a
    CPU reach less.
    """
    return flops / (peak_flops_per_second * mfu)


def all_reduce_seconds_rule(message_bytes: float, n_devices: int, link_bytes_per_second: float) -> float:
    """Seconds until n devices in a ring have the sum of what each holds: 2·(n-1)/n of it over each link, one way.

    Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms". A lower bound: no link reaches its nominal rate.
    """
    return 2 * (n_devices - 1) / n_devices * message_bytes / link_bytes_per_second


def kv_cache_bytes_rule(
    *, n_layers: int, n_kv_heads: int, head_dim: int, context_length: int, bytes_per_number: int = 2
) -> int:
    """Bytes of the keys and values that are kept while a sequence is generated: 2·L·kv·c·s numbers.

    Pope et al. 2022, "Efficiently Scaling Transformer Inference", section 3.3. Exact for a cache of that length.
    """
    return 2 * n_layers * n_kv_heads * head_dim * context_length * bytes_per_number


def decode_seconds_rule(
    parameter_bytes: float, kv_cache_bytes: float, bytes_per_second: float, *, batch_size: int = 1
) -> float:
    """Seconds to generate one token for each of `batch_size` sequences: all bytes are read once.

    Pope et al. 2022, section 2.1. Throughput is batch_size over this. A lower bound: no memory reaches its full
    bandwidth, and beyond a few hundred sequences decoding is bound by arithmetic.
    """
    return (parameter_bytes + batch_size * kv_cache_bytes) / bytes_per_second


def matmul_intensity_rule(m: int, k: int, n: int, *, bytes_per_number: int = 2) -> float:
    """FLOPs per byte moved of [m, k] · [k, n]; in 16 bits about m if m is small compared with k and n.

    Williams et al. 2009, "Roofline". Below its peak over its bandwidth a device is bound by bytes: 295 for an H100 in
    bf16. Exact if each number is read or written once.
    """
    return 2 * m * k * n / (bytes_per_number * (m * k + k * n + m * n))
