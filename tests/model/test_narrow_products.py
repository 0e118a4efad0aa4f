from napkin.kernels.products.linear import fp8_linear_emulated, linear
from napkin.model.config import ModelConfig
from napkin.model.kernel_forms import multiply_narrow
from napkin.model.layers import Linear
from napkin.model.transformer import Transformer


def test_routers_and_odd_sizes_stay_as_they_are() -> None:
    config = ModelConfig(vocab_size=32, context_length=8, d_model=32, n_layers=1, n_heads=2, n_experts=16, d_ff=40)
    model = Transformer(config)
    multiply_narrow(model.blocks, fp8_linear_emulated)
    changed = {
        name for name, module in model.named_modules() if isinstance(module, Linear) and module.multiply is not linear
    }
    assert changed == {"blocks.0.attention.query_key_value", "blocks.0.attention.output"}
