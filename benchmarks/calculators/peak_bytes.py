"""Peak bytes of a training step with AdamW: each calculator against the allocator's own events."""

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from calculators.flops import llm_analysis_of
from calculators.models import Decoder
from calculators.processes import available, in_process
from napkin import count
from oracles.allocator import growth_at_peak, storage_bytes  # pyright: ignore[reportMissingImports]
from oracles.torch_models import GPT2, Llama  # pyright: ignore[reportMissingImports]


@dataclass(frozen=True)
class Setting:
    """A decoder and how it is trained."""

    decoder: Decoder
    autocast: bool = False
    checkpointing: bool = False
    micro_batches: int = 1

    def build(self) -> nn.Module:
        """GPT-2 or, gated, Llama of those sizes."""
        d = self.decoder
        sizes = (d.vocab_size, d.length, d.n_layers, d.d_model, d.n_heads)
        if d.gated:
            return Llama(*sizes, d.n_kv_heads, d.d_ff, checkpointing=self.checkpointing)
        return GPT2(*sizes, checkpointing=self.checkpointing)


class Training:
    """Module, optimizer, batch and step of a setting; on fake tensors or on real ones."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.module = setting.build()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), fused=True)
        tokens = torch.zeros(
            setting.decoder.batch_size * setting.micro_batches, setting.decoder.length, dtype=torch.int64
        )
        self.batch = (tokens, tokens.clone())

    def step(self, module: nn.Module, batch: tuple[Tensor, ...]) -> None:
        """Train once: forward and backward passes of all micro-batches, update."""
        parts = self.setting.micro_batches
        for inputs in zip(*(tensor.chunk(parts) for tensor in batch), strict=True):
            with torch.autocast("cpu", torch.bfloat16) if self.setting.autocast else nullcontext():
                loss = module(*inputs)
            (loss / parts).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


GPT2_SMALL = Decoder(50257, 768, 12, 12, 12, 3072, False, 1, 1024)
LLAMA_LIKE = Decoder(32000, 768, 12, 12, 4, 2048, True, 1, 1024)
SMALL = Decoder(8192, 256, 4, 4, 4, 1024, False, 16, 256)
DEEP = Decoder(4096, 256, 10, 4, 2, 704, True, 8, 512)

SETTINGS: dict[str, Setting] = {
    "GPT-2 small, fp32": Setting(GPT2_SMALL),
    "GPT-2 small, autocast": Setting(GPT2_SMALL, autocast=True),
    "GPT-2 small, checkpointed": Setting(GPT2_SMALL, checkpointing=True),
    "GPT-2 small, 2 micro-batches": Setting(GPT2_SMALL, micro_batches=2),
    "Llama-like 125M, fp32": Setting(LLAMA_LIKE),
    "Llama-like 125M, autocast, checkpointed": Setting(LLAMA_LIKE, autocast=True, checkpointing=True),
    "GPT 5M, batch 16, fp32": Setting(SMALL),
    "GPT 5M, batch 16, autocast": Setting(SMALL, autocast=True),
    "GPT 5M, batch 16, checkpointed": Setting(SMALL, checkpointing=True),
    "GPT 5M, batch 16, 2 micro-batches, autocast": Setting(SMALL, autocast=True, micro_batches=2),
    "Llama-like 9M, batch 8, fp32": Setting(DEEP),
    "Llama-like 9M, batch 8, autocast, checkpointed, 2 micro-batches": Setting(
        DEEP, autocast=True, checkpointing=True, micro_batches=2
    ),
}


def table(names: list[str]) -> dict[str, dict[str, Any]]:
    """Calculator -> setting -> bytes, or why there are none; "truth" among them."""
    results = {"truth": {name: in_process("calculators.peak_bytes:truth", name) for name in names}}
    for calculator, (package, _) in CALCULATORS.items():
        if available(package):
            results[calculator] = in_process("calculators.peak_bytes:of_calculator", calculator, names)
    return results


def truth(name: str) -> int:
    """What is alive before a steady step, and the most by which the allocator grows in it."""
    torch.set_num_threads(1)
    training = Training(SETTINGS[name])
    training.step(training.module, training.batch)
    moments = [value for state in training.optimizer.state.values() for value in state.values()]
    resident = storage_bytes([*training.module.parameters(), *training.module.buffers(), *moments, *training.batch])
    return resident + growth_at_peak(lambda: training.step(training.module, training.batch))[0]


def of_calculator(calculator: str, names: list[str]) -> dict[str, int | str]:
    """Bytes of each setting by one calculator."""
    torch.set_num_threads(1)
    found: dict[str, int | str] = {}
    for name in names:
        try:
            found[name] = round(CALCULATORS[calculator][1](SETTINGS[name]))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:120]
    return found


def _napkin(setting: Setting) -> float:
    with FakeTensorMode():
        training = Training(setting)
        return count(training.module, training.batch, training.step).peak_bytes


def _parameters(setting: Setting) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in setting.build().parameters())


def _sixteen_bytes(setting: Setting) -> float:
    return 16 * _parameters(setting)


def _accelerate(setting: Setting) -> float:
    with torch.device("meta"):
        size, _ = _imported("accelerate.utils").calculate_maximum_sizes(setting.build())
    estimate = _imported("accelerate.commands.estimate").estimate_training_usage
    return max(estimate(size, "bfloat16" if setting.autocast else "float32").values())


def _deepspeed(setting: Setting) -> float:
    estimate = _imported("deepspeed.runtime.zero.stage_1_and_2").estimate_zero2_model_states_mem_needs
    _, device_bytes = estimate(_parameters(setting), cpu_offload=False)
    return device_bytes


def _torchinfo(setting: Setting) -> float:
    d = setting.decoder
    with torch.device("meta"):
        tokens = torch.zeros(d.batch_size, d.length, dtype=torch.int64)
        module = setting.build()
    found = _imported("torchinfo").summary(
        module, input_data=[tokens, tokens], verbose=0, mode="train", device=torch.device("meta")
    )
    return found.total_input + found.total_output_bytes + found.total_param_bytes


def _torchinfo_and_adamw(setting: Setting) -> float:
    return _torchinfo(setting) + 12 * _parameters(setting)


def _llm_analysis(setting: Setting) -> float:
    # It knows weights of 16 bits at most, and keeps a master copy of them.
    analysis = llm_analysis_of(setting.decoder)
    forms = _imported("llm_analysis.analysis").ActivationRecomputation
    found = analysis.training(
        batch_size_per_gpu=setting.decoder.batch_size,
        gradient_accumulation_steps=setting.micro_batches,
        seq_len=setting.decoder.length,
        total_num_tokens=10**9,
        activation_recomputation=forms.FULL if setting.checkpointing else forms.NONE,
        mlp_gated_linear_units=setting.decoder.gated,
    )
    return found["(weight+op_state+grad+act)_memory_per_gpu"]


def _eleuther(setting: Setting) -> float:
    """EleutherAI's rule (Anthony et al. 2023, "Transformer Math 101"), as its calculator states it.

    Weights and gradients at 4 bytes, AdamW at 12, and a layer's activations s·b·h·(16·p + 2 + (2·p + 1)·a·s/h) with p
    bytes per number, of which a checkpoint leaves the first part.
    """
    d = setting.decoder
    kv, matrices = d.n_kv_heads / d.n_heads, 3 if d.gated else 2
    parameters = 2 * d.vocab_size * d.d_model + d.d_model * d.length + (8 * d.n_layers + 2) * d.d_model
    parameters += d.n_layers * d.d_model * (2 * (1 + kv) * d.d_model + matrices * d.d_ff)
    p = 2 if setting.autocast else 4
    a_number = 16 * p + 2 + (0 if setting.checkpointing else (2 * p + 1) * d.n_heads * d.length / d.d_model)
    return (4 + 4 + 12) * parameters + d.length * d.batch_size * d.d_model * d.n_layers * a_number


def _imported(name: str) -> Any:
    return importlib.import_module(name)


# Name -> (package that brings it, how it is asked).
CALCULATORS: dict[str, tuple[str | None, Callable[[Setting], float]]] = {
    "napkin": (None, _napkin),
    "rule 16 bytes per parameter": (None, _sixteen_bytes),
    "accelerate estimate-memory": ("accelerate", _accelerate),
    "DeepSpeed's ZeRO-2 estimate": ("deepspeed", _deepspeed),
    "EleutherAI's rule": (None, _eleuther),
    "llm-analysis": ("llm-analysis", _llm_analysis),
    "torchinfo": ("torchinfo", _torchinfo),
    "torchinfo + 12 bytes per parameter": ("torchinfo", _torchinfo_and_adamw),
}
