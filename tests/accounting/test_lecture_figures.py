"""Figures of published lectures, by their row in the table of figures (F01, F02, ...)."""

import pytest
import torch

from napkin import Ledger, count
from napkin.accounting.recording import record
from napkin.accounting.rules import (
    backward_flops_rule,
    bytes_per_parameter,
    decode_seconds_rule,
    forward_flops_rule,
    gated_parameters_rule,
    kv_cache_bytes_rule,
    largest_model_rule,
    matmul_flops_rule,
    matmul_intensity_rule,
    seconds_rule,
    training_flops_rule,
)
from napkin.hardware.target import CudaTarget
from oracles.reference_ledgers import gpt2_xl_ledger
from oracles.torch_models import DeepLinear

H100_BF16 = 1979e12 / 2
H100_BYTES_PER_SECOND = 3.35e12


def test_f01_f02_days_to_train_70b_parameters_on_15t_tokens():
    flops = training_flops_rule(70e9, 15e12)
    assert flops == 6.3e24
    assert seconds_rule(flops, 1024 * H100_BF16) / 86400 == pytest.approx(143.92659381842682, rel=1e-12)


def test_f03_largest_model_on_eight_h100_with_adamw():
    assert largest_model_rule(8 * 80e9, bytes_per_parameter=bytes_per_parameter("adamw")) == 4.0e10


def test_f05_bytes_of_one_gpt3_feed_forward_matrix():
    with torch.device("meta"):
        matrix = torch.nn.Linear(12288, 4 * 12288, bias=False)
    x = torch.zeros(1, 12288)
    assert count(matrix, x).resident_bytes - x.nbytes == 2415919104


def test_f14_flops_of_eight_h100_in_a_week():
    assert seconds_rule(4.7875968e21, 8 * H100_BF16, mfu=1) == pytest.approx(7 * 86400, rel=1e-12)


def test_f15_f17_flops_of_a_matrix_product():
    assert matmul_flops_rule(1024, 512, 256) == 268435456
    assert matmul_flops_rule(16384, 32768, 8192) == 8796093022208
    with torch.device("meta"):
        layer = torch.nn.Linear(32768, 8192, bias=False)
    assert count(layer, torch.zeros(16384, 32768, device="meta")).forward_flops == 8796093022208


def test_f16_squaring_a_matrix_costs_one_an_element_apart_from_products():
    ledger = record(torch.nn.Module(), lambda: torch.zeros(1024, 512, device="meta").square())
    assert (ledger.elementwise_flops, ledger.flops) == (524288, 0)
    assert "524 kFLOP" in repr(ledger)


def test_f18_f22_forward_and_backward_are_six_flops_a_parameter_and_example_by_the_rule():
    for parameters, examples in ((8256, 8), (36, 2)):
        forward, backward = forward_flops_rule(parameters, examples), backward_flops_rule(parameters, examples)
        assert forward + backward == training_flops_rule(parameters, examples) == 6 * parameters * examples
    assert training_flops_rule(36, 2) == 432


def test_f19_the_deep_linear_models_first_layer_needs_no_gradient_of_its_input():
    ledger = count(DeepLinear(64, 2), torch.zeros(8, 64))
    rule = training_flops_rule(ledger.parameters, 8)
    assert (ledger.flops, rule) == (330752, 396288)
    assert rule / ledger.flops == pytest.approx(1.198, abs=5e-4)


def test_f20_f21_parameters_and_rule_bytes_of_a_small_deep_linear_model():
    parameters = count(DeepLinear(4, 2), torch.zeros(2, 4)).parameters
    assert parameters == 36
    activations = 2 * 4 * 2
    assert bytes_per_parameter("adagrad") * parameters + 4 * activations == 496


class _AdaGrad(torch.optim.Optimizer):
    """As a lecture writes it: one expression for the state, one for the update."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["squares"] = state.get("squares", 0) + parameter.grad**2
            parameter -= self.param_groups[0]["lr"] * parameter.grad / torch.sqrt(state["squares"] + 1e-5)


def test_f21_the_updates_temporaries_raise_the_peak_above_the_rule():
    model, x, y = DeepLinear(4, 2), torch.zeros(2, 4), torch.zeros(2)
    optimizer = _AdaGrad(model.parameters(), {"lr": 0.01})

    def step() -> None:
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    ledger = record(model, step, warm_up=1)
    assert ledger.peak_bytes == 672
    # Activations are gone by then; above parameters, gradients and state are three matrices of the update.
    by_category = ledger.peak_by_category
    assert [by_category[name] for name in ("parameters", "gradients", "optimizer state")] == [4 * 36] * 3
    assert by_category["temporaries"] == 3 * 4 * (4 * 4)


def test_f24_bytes_a_parameter():
    assert [bytes_per_parameter("adagrad"), bytes_per_parameter("adamw"), bytes_per_parameter("adamw", mixed=True)] == [
        12,
        16,
        16,
    ]


def test_f35_decoding_one_token_is_bound_by_bytes_up_to_a_batch_of_hundreds():
    balance = H100_BF16 / H100_BYTES_PER_SECOND
    assert balance == pytest.approx(295, abs=0.5)
    assert matmul_intensity_rule(1, 8192, 8192) == pytest.approx(1, rel=1e-3)
    assert matmul_intensity_rule(256, 8192, 8192) < balance < matmul_intensity_rule(1024, 8192, 8192)


@pytest.mark.parametrize(
    ("n_kv_heads", "batch_size", "gigabytes", "milliseconds", "tokens_per_second"),
    [
        pytest.param(40, 1, 26.87, 8.02, 124.7, id="F37"),
        pytest.param(40, 64, 79.72, 23.80, 2689, id="F38"),
        pytest.param(8, 64, 33.41, 9.97, 6417, id="F39"),
        pytest.param(8, 256, 65.63, 19.59, 13068, id="F39 at 256"),
    ],
)
def test_f36_to_f39_decoding_llama_2_13b(
    n_kv_heads: int, batch_size: int, gigabytes: float, milliseconds: float, tokens_per_second: float
):
    sizes = {"vocab_size": 32000, "d_model": 5120, "n_layers": 40, "d_ff": 13824, "n_heads": 40}
    parameters = gated_parameters_rule(**sizes, n_kv_heads=n_kv_heads, tied=False)
    cache = kv_cache_bytes_rule(n_layers=40, n_kv_heads=n_kv_heads, head_dim=128, context_length=1024)
    if n_kv_heads == 40:
        assert (parameters, cache) == (13015449600, 838860800)
    seconds = decode_seconds_rule(2 * parameters, cache, H100_BYTES_PER_SECOND, batch_size=batch_size)
    assert (2 * parameters + batch_size * cache) / 1e9 == pytest.approx(gigabytes, abs=0.005)
    assert 1e3 * seconds == pytest.approx(milliseconds, abs=0.005)
    assert batch_size / seconds == pytest.approx(tokens_per_second, rel=5e-4)


def test_f40_peak_of_gpt2_xl_in_bf16_by_the_bytes_of_a_layer(without_measured_scratch: None):
    peaks = [gpt2_xl_ledger(checkpointing=False, n_layers=n_layers).peak_bytes for n_layers in (2, 3, 4)]
    a_layer = peaks[1] - peaks[0]
    assert peaks[2] == peaks[1] + a_layer
    assert round((peaks[0] + 46 * a_layer) / 2**30, 1) == 29.8


@pytest.mark.torture
def test_f40_peak_of_gpt2_xl_in_bf16(gpt2_xl: Ledger):
    # Resident at the peak: weights and both of AdamW's moments in bf16; gradients are not yet born.
    assert round(gpt2_xl.peak_bytes / 2**30, 1) == 29.8


@pytest.mark.torture
def test_f40_peak_of_gpt2_xl_in_bf16_on_a_gpu_with_flash_attention(gpt2_xl: Ledger):
    flash = gpt2_xl_ledger(checkpointing=False, target=CudaTarget((8, 0)))
    assert sum("_scaled_dot_product_flash_attention" in row.operator for row in flash.rows) == 2 * 48
    assert flash.flops == gpt2_xl.flops
    # In blocks of the allocator it is 1% more: 20 MiB hold four matrices of 4.9 MiB, and so no more of them.
    assert round(sum(row.bytes_kept for row in flash.rows) / 2**30, 1) == 19.6
    assert round(flash.peak_bytes / 2**30, 1) == 30.1
    assert flash.reserved_bytes is not None
    assert flash.peak_bytes < flash.reserved_bytes < 1.1 * flash.peak_bytes


@pytest.mark.torture
def test_f40_peak_of_gpt2_xl_in_bf16_with_checkpointing(gpt2_xl: Ledger):
    checkpointed = gpt2_xl_ledger(checkpointing=True)
    assert round(checkpointed.peak_bytes / 2**30, 1) == 12.2
    assert checkpointed.flops == gpt2_xl.flops
    assert checkpointed.hardware_flops > gpt2_xl.hardware_flops


def test_f41_gpt2_small(gpt2: Ledger):
    assert (gpt2.parameters, gpt2.forward_flops) == (124439808, 291648307200)


def test_f42_llama_like(llama: Ledger):
    assert (llama.parameters, llama.forward_flops) == (124668672, 243605176320)
    rule = gated_parameters_rule(
        vocab_size=32000, d_model=768, n_layers=12, d_ff=2048, n_heads=12, n_kv_heads=4, tied=False
    )
    assert rule / llama.parameters - 1 == pytest.approx(-0.00015, abs=1e-5)


def test_f43_peak_bytes_of_a_full_step_in_fp32_with_adamw(gpt2: Ledger, llama: Ledger):
    assert round(gpt2.peak_bytes / 1e9, 3) == 2.722
    assert round(llama.peak_bytes / 1e9, 3) == 2.667
    for ledger, error in ((gpt2, -0.27), (llama, -0.25)):
        assert 16 * ledger.parameters / ledger.peak_bytes - 1 == pytest.approx(error, abs=0.005)
