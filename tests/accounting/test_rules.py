import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from napkin import Ledger, count
from napkin.accounting import rules
from napkin.accounting.rules import (
    Sizes,
    activation_bytes_rule,
    adamw_bytes_rule,
    attention_flops_rule,
    backward_flops_rule,
    compute_optimal_tokens_rule,
    forward_flops_rule,
    gated_parameters_rule,
    kv_cache_bytes_rule,
    largest_model_rule,
    layered_parameters_rule,
    matmul_intensity_rule,
    parameters_rule,
    rules_table,
    training_flops_rule,
)
from oracles.reference_ledgers import gpt2_xl_ledger, tokens_of
from oracles.torch_models import GPT2, DeepLinear, Llama

GPT2_SIZES = {"vocab_size": 50257, "d_model": 768, "n_layers": 12}
LLAMA_SIZES = {"vocab_size": 32000, "d_model": 768, "n_layers": 12, "tied": False}


def assert_stated(rule: Callable[..., Any], value: float, counted: float, stated: str) -> None:
    """The rule's docstring says, in those words, how far `value` is from the count."""
    digits = len(stated.partition("%")[0].partition(".")[2])
    error = value / counted - 1
    assert stated in " ".join((rule.__doc__ or "").split())
    assert f"{abs(error):.{digits}%} {'over' if error > 0 else 'under'}" == stated


def kept_by_a_block(ledger: Ledger) -> int:
    return sum(row.bytes_kept for row in ledger.rows if f"{row.module}.".startswith("blocks.1."))


def test_rules_of_parameters_are_as_far_off_as_they_say(gpt2: Ledger, llama: Ledger):
    assert_stated(parameters_rule, parameters_rule(**GPT2_SIZES, tied=True), gpt2.parameters, "0.73% under")
    assert_stated(parameters_rule, parameters_rule(**LLAMA_SIZES), llama.parameters, "7.6% over")
    gated = gated_parameters_rule(**LLAMA_SIZES, d_ff=2048, n_heads=12, n_kv_heads=4)
    assert_stated(gated_parameters_rule, gated, llama.parameters, "0.015% under")
    with torch.device("meta"):
        large = Llama(n_layers=40, d_model=5120, n_heads=40, n_kv_heads=40, d_ff=13824)
    gated = gated_parameters_rule(
        vocab_size=32000, d_model=5120, n_layers=40, d_ff=13824, n_heads=40, n_kv_heads=40, tied=False
    )
    parameters = sum(parameter.numel() for parameter in large.parameters())
    assert_stated(gated_parameters_rule, gated, parameters, "0.003% under")


def test_the_rule_by_layers_is_as_far_off_as_it_says(gpt2: Ledger, llama: Ledger):
    shape = {"d_ff": 3072, "n_heads": 12, "n_kv_heads": 12, "head_dim": 64, "gated": False, "positions": 1024}
    by_layers = layered_parameters_rule(**GPT2_SIZES, tied=True, **shape)
    assert_stated(layered_parameters_rule, by_layers, gpt2.parameters, "0.098% under")
    by_layers = layered_parameters_rule(**LLAMA_SIZES, d_ff=2048, n_heads=12, n_kv_heads=4, head_dim=64)
    assert_stated(layered_parameters_rule, by_layers, llama.parameters, "0.015% under")


def test_parameters_by_layer_are_those_of_dense_and_routed_layers_by_hand():
    shape = {"vocab_size": 10, "d_model": 4, "n_layers": 3, "d_ff": 8, "n_heads": 2, "n_kv_heads": 1, "head_dim": 2}
    experts = {"n_experts": 3, "n_routed": 5, "d_expert": 6, "n_dense_layers": 1}
    attention, dense, experts_and_router, table = 2 * 4 * 2 * 3, 3 * 4 * 8, 3 * (3 * 4 * 6) + 4 * 5, 10 * 4
    expected = 3 * attention + dense + 2 * experts_and_router + table
    rule = partial(layered_parameters_rule, **shape, **experts)
    assert rule(tied=True) == expected


def test_rules_of_flops_are_as_far_off_as_they_say(gpt2: Ledger, llama: Ledger):
    training = training_flops_rule(gpt2.parameters, 1024)
    assert_stated(training_flops_rule, training, gpt2.flops, "13% under")
    assert_stated(training_flops_rule, training_flops_rule(llama.parameters, 1024), llama.flops, "5% over")
    forward = forward_flops_rule(gpt2.parameters, 1024)
    assert forward / gpt2.forward_flops == pytest.approx(training / gpt2.flops, rel=1e-12)
    with torch.device("meta"):
        long = count(GPT2(context_length=16384), tokens_of(1, 16384))
    assert_stated(training_flops_rule, training_flops_rule(long.parameters, 16384), long.flops, "68% under")
    deep_linear = count(DeepLinear(64, 2), torch.zeros(8, 64))
    assert_stated(training_flops_rule, training_flops_rule(deep_linear.parameters, 8), deep_linear.flops, "20% over")
    backward = backward_flops_rule(deep_linear.parameters, 8)
    assert_stated(backward_flops_rule, backward, deep_linear.backward_flops, "33% over")


def test_the_rule_of_attention_is_exact_and_its_sum_as_far_off_as_it_says(gpt2: Ledger, llama: Ledger):
    attention = attention_flops_rule(n_layers=12, d_model=768, context_length=1024, tokens=1024)
    for ledger, stated in ((gpt2, "0.6% over"), (llama, "21% over")):
        assert sum(row.flops for row in ledger.rows if "attention" in row.operator) == attention
        whole = training_flops_rule(ledger.parameters, 1024) + attention
        assert_stated(attention_flops_rule, whole, ledger.flops, stated)


def test_rules_of_bytes_are_as_far_off_as_they_say(gpt2: Ledger, without_measured_scratch: None):
    assert_stated(adamw_bytes_rule, adamw_bytes_rule(gpt2.parameters), gpt2.peak_bytes, "27% under")
    assert largest_model_rule(adamw_bytes_rule(gpt2.parameters)) == gpt2.parameters
    sizes: dict[str, Any] = {"batch_size": 8, "context_length": 1024, "d_model": 1600, "n_heads": 25}
    fused = gpt2_xl_ledger(checkpointing=False, n_layers=2)
    assert_stated(activation_bytes_rule, activation_bytes_rule(**sizes), kept_by_a_block(fused), "6% over")
    with sdpa_kernel(SDPBackend.MATH):
        plain = gpt2_xl_ledger(checkpointing=False, n_layers=2)
    rule = activation_bytes_rule(**sizes, form="plain")
    assert_stated(activation_bytes_rule, rule, kept_by_a_block(plain), "12% over")
    checkpointed = gpt2_xl_ledger(checkpointing=True, n_layers=2)
    assert activation_bytes_rule(**sizes, form="checkpointed") == kept_by_a_block(checkpointed)


def test_the_rule_of_compute_optimal_tokens_is_near_its_source():
    # Hoffmann et al. 2022, table 3.
    for parameters, tokens, stated in ((1e9, 20.2e9, "1% under"), (67e9, 1.5e12, "11% under")):
        assert_stated(compute_optimal_tokens_rule, compute_optimal_tokens_rule(parameters), tokens, stated)
    # What Chinchilla itself was trained on.
    assert compute_optimal_tokens_rule(70e9) == 1.4e12


def test_the_rule_of_the_kv_cache_is_what_a_models_keys_and_values_take():
    model = Llama(50, 16, 3, 32, 4, 2, 48).to(torch.bfloat16)
    outputs: list[torch.Tensor] = []
    for block in model.blocks:
        for layer in (block.key, block.value):
            layer.register_forward_hook(lambda _, inputs, output: outputs.append(output))  # pyright: ignore
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    model(tokens, tokens)
    rule = kv_cache_bytes_rule(n_layers=3, n_kv_heads=2, head_dim=8, context_length=16)
    assert rule == sum(output.nbytes for output in outputs)


def test_the_rule_of_intensity_is_a_products_flops_over_the_bytes_it_moves():
    ledger = count(torch.nn.Linear(64, 32, bias=False), torch.zeros(16, 64))
    (row,) = [row for row in ledger.rows if row.flops and row.phase == "forward"]
    rule = matmul_intensity_rule(16, 64, 32, bytes_per_number=4)
    assert row.flops / (row.bytes_read + row.bytes_written) == rule


def test_each_rule_names_its_source():
    public = [getattr(rules, name) for name in dir(rules) if name.endswith("_rule")]
    assert len(public) > 12
    unsourced = [rule.__name__ for rule in public if not re.search(r"\b(19|20)\d\d\b", rule.__doc__ or "")]
    # Two are definitions, of a product and of a norm, one is another rule solved for its other side.
    assert set(unsourced) == {"matmul_flops_rule", "norm_flops_rule", "largest_model_rule"}


SIZES = Sizes(
    vocab_size=50257,
    d_model=768,
    n_layers=12,
    n_heads=12,
    n_kv_heads=12,
    d_ff=3072,
    tied=True,
    gated=False,
    batch_size=1,
    sequences=1,
    context_length=1024,
)


def test_the_table_puts_each_rule_beside_the_count_of_the_same_thing(gpt2: Ledger):
    rows = {row.quantity: row for row in rules_table(gpt2, SIZES)}
    attention = sum(row.flops for row in gpt2.rows if "attention" in row.operator)
    counted = {
        "parameters": gpt2.parameters,
        "FLOPs, forward": gpt2.forward_flops,
        "FLOPs, backward": gpt2.backward_flops,
        "FLOPs, training": gpt2.flops,
        "FLOPs, attention": attention,
        "FLOPs, with attention": gpt2.flops,
        "peak bytes, AdamW": gpt2.peak_bytes,
        "activations per layer, flash": kept_by_a_block(gpt2),
    }
    for quantity, value in counted.items():
        assert rows[quantity].count == value
    # What this step does not do is not held against it; what needs a machine waits for one.
    assert rows["activations per layer, plain"].count is rows["activations per layer, checkpointed"].error is None
    assert rows["arithmetic intensity"].error == pytest.approx(0)
    assert {"largest model", "time of the run", "throughput"}.isdisjoint(rows)
    errors = {name: rows[name].error for name in ("FLOPs, attention", "FLOPs, training", "peak bytes, AdamW")}
    assert errors == pytest.approx(
        {"FLOPs, attention": 0, "FLOPs, training": -0.1262, "peak bytes, AdamW": -0.2685}, abs=1e-4
    )


def test_the_table_of_a_machine_and_a_run(gpt2: Ledger):
    machine: dict[str, Any] = {"memory_bytes": 80e9, "flops_per_second": 989.5e12, "bytes_per_second": 3.35e12}
    rows = {row.quantity: row for row in rules_table(gpt2, SIZES, **machine, training_tokens=2.5e9)}
    assert rows["largest model"].rule == 5e9
    assert rows["largest model"].count == pytest.approx(80e9 * gpt2.parameters / gpt2.peak_bytes)
    assert rows["time of the run"].count == pytest.approx(2.5e9 / 1024 * gpt2.flops / (989.5e12 * 0.5))
    assert rows["tokens to train on"].rule == 20 * gpt2.parameters
    assert rows["latency of a token"].rule < 64 / rows["throughput"].rule


def test_the_table_of_an_accumulated_checkpointed_step_is_of_one_micro_batch():
    model = Llama(50, 16, 2, 32, 4, 2, 48, checkpointing=True)

    def step(module: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> None:
        for part in zip(*(tensor.split(2) for tensor in batch), strict=True):
            module(*part).backward()

    ledger = count(model, tokens_of(6, 16), step)
    sizes = Sizes(
        vocab_size=50,
        d_model=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        d_ff=48,
        tied=False,
        batch_size=2,
        sequences=6,
        context_length=16,
    )
    rows = {row.quantity: row for row in rules_table(ledger, sizes, block="blocks.1")}
    # In fp32, which the rule does not know of.
    assert rows["activations per layer, checkpointed"].error == -0.5
    assert rows["activations per layer, flash"].count is None
    assert rows["FLOPs, training"].rule == 6 * ledger.parameters * 6 * 16
    assert rows["parameters, gated"].error == pytest.approx(-0.01, abs=0.01)
