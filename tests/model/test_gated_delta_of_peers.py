"""Gated DeltaNet beside the layer of Qwen3-Next in transformers, with the same weights."""

import pytest
import torch

from napkin.model.config import ModelConfig
from napkin.model.state_space import GatedDeltaNet
from peers import peer


@pytest.mark.peers
def test_the_layer_computes_what_qwen3_nexts_does() -> None:
    peer("transformers")
    library = peer("transformers.models.qwen3_next.modeling_qwen3_next")
    configs = peer("transformers.models.qwen3_next.configuration_qwen3_next")
    torch.manual_seed(0)
    theirs = library.Qwen3NextGatedDeltaNet(
        configs.Qwen3NextConfig(
            hidden_size=24, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6,
            linear_value_head_dim=8, linear_conv_kernel_dim=4, num_hidden_layers=1, layer_types=["linear_attention"],
            rms_norm_eps=1e-5,
        ),
        0,
    ).eval()  # fmt: skip
    for parameter in theirs.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    config = ModelConfig(
        vocab_size=9, d_model=24, n_layers=1, mixers="gated_delta", state_size=6, state_heads=4, state_head_dim=8,
        state_groups=2,
    )  # fmt: skip
    ours = GatedDeltaNet(config)
    # There the rows stand by key head: queries, keys, values and gates of its two heads; then rates and steps.
    by_key_head = theirs.in_proj_qkvz.weight.view(2, 6 + 6 + 16 + 16, 24).split((6, 6, 16, 16), dim=1)
    queries, keys, values, gates = (part.reshape(-1, 24) for part in by_key_head)
    rates, steps = (part.reshape(-1, 24) for part in theirs.in_proj_ba.weight.view(2, 4, 24).split(2, dim=1))
    of_queries, of_keys, of_values = theirs.conv1d.weight.split((12, 12, 32))
    with torch.no_grad():
        ours.input.weight.copy_(torch.cat((gates, values, keys, queries, steps, rates)))
        ours.convolution.weight.copy_(torch.cat((of_values, of_keys, of_queries)))
        ours.step_bias.copy_(theirs.dt_bias)
        ours.log_decay.copy_(theirs.A_log)
        ours.norm.gain.copy_(theirs.norm.weight)
        ours.output.weight.copy_(theirs.out_proj.weight)
        x = torch.randn(2, 150, 24)
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
