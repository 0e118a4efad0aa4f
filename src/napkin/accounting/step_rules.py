"""A training step on many devices in closed form: parameters, bytes of a rank, FLOPs, seconds.

Every function here is arithmetic on numbers, and calls nothing but other rules: `napkin.studio` translates them into
JavaScript, so that a page computes what Python computes while its controls are dragged.
"""

from typing import Any

from napkin.accounting.failures import daly_interval, mtbf_of_devices
from napkin.accounting.rules import (
    attention_flops_rule,
    kv_cache_bytes_rule,
    latent_attention_parameters_rule,
    latent_cache_bytes_rule,
    layered_parameters_rule,
    training_flops_rule,
)


def bubble_rule(pipeline: int, micro_batches: float, stages_per_rank: int = 1) -> float:
    """Seconds that a rank of a pipeline waits, as a part of those that it computes: (p-1)/(m·v).

    Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section
    2.2. Exact where all stages take equally long and sending takes nothing.
    """
    return (pipeline - 1) / (micro_batches * stages_per_rank)


def block_kept_bytes_rule(
    *,
    d_model: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    d_ff: int,
    gated: bool,
    residual_bytes: int = 4,
    number_bytes: int = 2,
) -> int:
    """Bytes per token that a block with fused attention keeps for its backward pass.

    Two norms keep what they read of the residual stream and what they return, 2·(r + b)·d; attention its queries, keys,
    values and result, b·c·(2·h + 2·kv), and a sum per head in fp32; the feed-forward layer what is before and after its
    nonlinearity, b·2·ff, and with a gate b·4·ff. r bytes are those of a number of the residual stream, which autocast
    leaves in fp32, b those of other numbers.

    The method is that of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
    section 4.1, without dropout and for attention that stores no scores.
    """
    norms = 2 * (residual_bytes + number_bytes) * d_model
    attention = number_bytes * head_dim * 2 * (n_heads + n_kv_heads) + 4 * n_heads
    return norms + attention + number_bytes * (4 if gated else 2) * d_ff


def model_rule(
    *,
    vocab_size: int,
    context_length: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    d_ff: int,
    tied: bool,
    gated: bool,
    learned_positions: bool = False,
    n_sharing_layers: int = 0,
    n_experts: int = 0,
    experts_per_token: int = 0,
    n_shared_experts: int = 0,
    d_expert: int = 0,
    n_dense_layers: int = 0,
    kv_lora_rank: int | None = None,
    q_lora_rank: int | None = None,
    qk_nope_head_dim: int = 0,
    qk_rope_head_dim: int = 0,
    residual_bytes: int = 4,
    number_bytes: int = 2,
) -> dict[str, float]:
    """What a model is by rule, of its sizes: `parameters`, those a token is multiplied with, those of routed experts.

    `attention_flops` are those of a training step per token, over pairs of tokens. `kept_bytes` are those that
    `block_kept_bytes_rule` has for a token and a block, whose feed-forward layer is as wide as the experts that a token
    uses; `cache_bytes` are those of a sequence of `context_length` tokens. Norms and biases are missing.
    """
    attention = None
    cache_bytes = kv_cache_bytes_rule(
        n_layers=n_layers - n_sharing_layers, n_kv_heads=n_kv_heads, head_dim=head_dim, context_length=context_length
    )
    if kv_lora_rank is not None:
        attention = latent_attention_parameters_rule(
            d_model=d_model,
            n_heads=n_heads,
            kv_lora_rank=kv_lora_rank,
            q_lora_rank=q_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
        )
        cache_bytes = latent_cache_bytes_rule(
            n_layers=n_layers,
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            context_length=context_length,
        )
    positions = context_length if learned_positions else 0
    parameters = layered_parameters_rule(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        d_ff=d_ff,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        tied=tied,
        gated=gated,
        n_experts=n_experts + n_shared_experts if n_experts > 0 else 0,
        n_routed=n_experts,
        d_expert=d_expert,
        n_dense_layers=n_dense_layers,
        positions=positions,
        attention=attention,
        n_sharing_layers=n_sharing_layers,
    )
    # One expert in each of the layers that have them.
    expert = (n_layers - n_dense_layers if n_experts > 0 else 0) * (3 if gated else 2) * d_model * d_expert
    looked_up = ((0 if tied else vocab_size) + positions) * d_model
    kept_bytes = block_kept_bytes_rule(
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        d_ff=(experts_per_token + n_shared_experts) * d_expert if n_experts > 0 else d_ff,
        gated=gated,
        residual_bytes=residual_bytes,
        number_bytes=number_bytes,
    )
    return {
        "parameters": parameters,
        "multiplying": parameters - (n_experts - experts_per_token) * expert - looked_up,
        "expert_parameters": n_experts * expert,
        "attention_flops": attention_flops_rule(
            n_layers=n_layers,
            d_model=n_heads * (head_dim + v_head_dim) / 2,
            context_length=context_length,
            tokens=1,
        ),
        "kept_bytes": kept_bytes,
        "cache_bytes": cache_bytes,
    }


def rank_state_rule(
    *,
    parameters: float,
    gathered: float,
    gathered_gradients: float,
    weight_bytes: int,
    gradient_bytes: int,
    state_bytes: int,
    product_bytes: int,
    shard: int,
    copies: int,
    shard_optimizer: bool,
) -> dict[str, float]:
    """Bytes of weights, gradients, optimizer's state and copies of weights on a rank, whose part of the model has so
    many `parameters`, divided among `shard` ranks, `copies` times.

    State is 16 bytes per parameter of AdamW in fp32, divided among the ranks that share it (Rajbhandari et al. 2020,
    "ZeRO"). Gradients that whole copies of a model exchange are held twice, in buckets. Copies of weights are those in
    16 bits or, where ranks share a model, what is whole for a time: `gathered` weights and `gathered_gradients`.
    """
    weight_copies = product_bytes * parameters if product_bytes < weight_bytes else 0
    if shard > 1:
        weight_copies = product_bytes * gathered + gradient_bytes * gathered_gradients
    buckets = gradient_bytes * parameters if shard == 1 and copies > 1 else 0
    return {
        "parameters": weight_bytes * parameters / shard,
        "gradients": gradient_bytes * parameters / shard + buckets,
        "optimizer_state": state_bytes * parameters / (shard * (copies if shard_optimizer else 1)),
        "weight_copies": weight_copies,
    }


def step_rule(
    *,
    vocab_size: int,
    context_length: int,
    d_model: int,
    n_layers: int,
    tied: bool,
    batch_size: int,
    micro_batch_size: int,
    loss_chunk_size: int,
    recompute: str = "none",
    weight_bytes: int = 4,
    gradient_bytes: int = 4,
    state_bytes: int = 8,
    product_bytes: int = 2,
    data: int = 1,
    shard: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    context: int = 1,
    expert: int = 1,
    shard_optimizer: bool = False,
    peak: float,
    efficiency: float = 0.5,
    **sizes: Any,
) -> dict[str, float]:
    """What one step takes by rule: `parameters`, those a token is multiplied with, `flops` of the model,
    `computed_flops` with what is computed again, seconds, MFU, and bytes of the first rank by what they are for.

    Sizes are those of a recipe; `sizes` are the others of `model_rule`. A number of a weight takes `weight_bytes`, of
    its gradient `gradient_bytes`, of the optimizer's state `state_bytes`, of a product `product_bytes`. `peak` is one
    device's dense FLOP/s, of which products reach `efficiency` while they compute; waiting in a pipeline comes on top.

    Weights, gradients and state are those of `rank_state_rule`; the tables and two blocks are gathered at a time, and
    gradients of the tables and a block. Kept activations are those of `block_kept_bytes_rule`, of as many micro-batches
    as there are ranks in the pipeline, or with full recomputation what each block reads, and one block. Logits take 8
    bytes each, of a chunk at a time. Not included: norms, biases, what a caching allocator wastes, waiting for
    collectives.
    """
    residual_bytes = max(weight_bytes, product_bytes)
    model = model_rule(
        vocab_size=vocab_size,
        context_length=context_length,
        d_model=d_model,
        n_layers=n_layers,
        tied=tied,
        residual_bytes=residual_bytes,
        number_bytes=product_bytes,
        **sizes,
    )
    parameters = model["parameters"]
    tokens = batch_size * context_length
    attention_flops = tokens * model["attention_flops"]
    flops = training_flops_rule(model["multiplying"], tokens) + attention_flops
    again = 0.0
    if recompute == "full":
        head = training_flops_rule(vocab_size * d_model, tokens)
        again = (flops - head) / 3
    computed = flops + again

    devices = data * shard * tensor * pipeline * context
    micro_batches = batch_size / (data * shard * micro_batch_size)
    bubble = bubble_rule(pipeline, micro_batches)
    seconds = computed / (devices * peak * efficiency) * (1 + bubble)

    # Parameters of the first rank, and of what is gathered for a time.
    with_own_experts = parameters - model["expert_parameters"] + model["expert_parameters"] / expert
    table = vocab_size * d_model
    tables = (1 if tied or pipeline > 1 else 2) * table / tensor
    block = (with_own_experts - (1 if tied else 2) * table) / n_layers / tensor
    state = rank_state_rule(
        parameters=with_own_experts / (tensor * pipeline),
        gathered=tables + 2 * block,
        gathered_gradients=tables + block,
        weight_bytes=weight_bytes,
        gradient_bytes=gradient_bytes,
        state_bytes=state_bytes,
        product_bytes=product_bytes,
        shard=shard,
        copies=data * context,
        shard_optimizer=shard_optimizer,
    )
    rank_tokens = micro_batch_size * context_length / (tensor * context)
    blocks_in_flight = min(pipeline, micro_batches) * (n_layers / pipeline)
    activations = blocks_in_flight * model["kept_bytes"] * rank_tokens
    if recompute == "full":
        activations = (blocks_in_flight * residual_bytes * d_model + model["kept_bytes"]) * rank_tokens
    rows = min(loss_chunk_size, micro_batch_size * context_length / context)
    logits = 8 * rows * vocab_size / tensor
    weights_and_state = state["parameters"] + state["gradients"] + state["optimizer_state"] + state["weight_copies"]
    return {
        **state,
        "activations": activations,
        "logits": logits,
        "bytes": weights_and_state + activations + logits,
        "all_parameters": parameters,
        "multiplying": model["multiplying"],
        "tokens": tokens,
        "flops": flops,
        "computed_flops": computed,
        "attention_flops": attention_flops,
        "devices": devices,
        "micro_batches": micro_batches,
        "bubble": bubble,
        "seconds": seconds,
        "mfu": flops / (devices * peak * seconds),
        "cache_bytes": model["cache_bytes"],
    }


def run_rule(
    *,
    steps: float,
    seconds: float,
    devices: int,
    parameters: float,
    usd_per_hour: float = 0.0,
    watts: float = 0.0,
    host_bandwidth: float = 25e9,
    restart_seconds: float = 600.0,
) -> dict[str, float]:
    """A run of so many steps by rule: seconds, dollars, kilowatt-hours, failures and the interval of checkpoints.

    The rate of failures is that of Llama 3's run; a checkpoint is weight and two moments in fp32, of which each device
    copies its part to its host. Lost time is that of Young 1974: half an interval and a restart for each failure, and a
    pause for each checkpoint.
    """
    useful = steps * seconds
    mtbf = mtbf_of_devices(devices)
    pause = 12 * parameters / devices / host_bandwidth
    interval = daly_interval(pause, mtbf)
    lost = pause / interval + (interval / 2 + restart_seconds) / mtbf
    hours = useful / 3600
    return {
        "seconds": useful,
        "device_hours": devices * hours,
        "dollars": devices * hours * usd_per_hour,
        "kilowatt_hours": devices * hours * watts / 1000,
        "failures": useful / mtbf,
        "checkpoint_interval": interval,
        "goodput": 1 / (1 + lost),
    }
