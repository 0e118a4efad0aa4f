"""FLOPs of a forward and a backward pass: each calculator against the products of a step, one by one."""

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from calculators.models import CASES, Batch, Decoder, ExpertChoice
from calculators.processes import available, in_process
from napkin import count
from oracles.brute_force_flops import ScalarProducts  # pyright: ignore[reportMissingImports]

NOT_FOR_THIS = "not for this model"
# Calculators that count a forward pass: a backward pass costs twice that, as each of them says.
STEP = 3


class SizedProducts(ScalarProducts):
    """The oracle with its loops left out: a product's multiplications and additions are those of its sizes."""

    def multiply_and_add(self, equation: str, left: Tensor, right: Tensor, mask: Tensor | None) -> Tensor:
        inputs, output = equation.split("->")
        sizes = dict(zip(inputs.replace(",", ""), (*left.shape, *right.shape), strict=True))
        if set(sizes) - set(output):
            self.flops += 2 * math.prod(sizes.values())
        return left.new_empty([sizes[label] for label in output])


def table(names: list[str]) -> dict[str, dict[str, Any]]:
    """Calculator -> model -> FLOPs, or why there are none; "truth" among them."""
    cases = [name for name in names if available(CASES[name].needs)]
    results: dict[str, dict[str, Any]] = {"truth": in_process("calculators.flops:truths", cases)}
    for calculator, (package, _) in CALCULATORS.items():
        if available(package):
            results[calculator] = in_process("calculators.flops:of_calculator", calculator, cases)
    return results


def truths(names: list[str]) -> dict[str, int]:
    """FLOPs by the oracle, which has first to agree with itself, scalar by scalar, on a small copy of the model."""
    found = {}
    for name in names:
        torch.set_default_dtype(torch.float64)
        module, batch = CASES[name].build(True)
        assert _by(ScalarProducts(), module, batch) == _by(SizedProducts(), module.to("meta"), _on_meta(batch)), name
        torch.set_default_dtype(torch.float32)
        with torch.device("meta"):
            module, _ = CASES[name].build(False)
        found[name] = _by(SizedProducts(), module, _on_meta(CASES[name].build(False)[1]))
    return found


def _by(oracle: ScalarProducts, module: nn.Module, batch: Batch) -> int:
    with oracle:
        torch.autograd.backward(module(*batch))
    return oracle.flops


def _on_meta(batch: Batch) -> Batch:
    return tuple(tensor.to("meta") for tensor in batch)


def of_calculator(calculator: str, names: list[str]) -> dict[str, int | str]:
    """FLOPs of each model by one calculator, or why there are none."""
    found: dict[str, int | str] = {}
    for name in names:
        module, batch = CASES[name].build(False)
        try:
            found[name] = round(CALCULATORS[calculator][1](module, batch, CASES[name].decoder))
        except _NotForThis:
            found[name] = NOT_FOR_THIS
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:120]
    return found


class _NotForThis(Exception):
    """A formula that speaks of other models."""


def _napkin(module: nn.Module, batch: Batch, decoder: Decoder | None = None) -> float:
    return count(module, batch).flops


def _flop_counter(module: nn.Module, batch: Batch, decoder: Decoder | None = None) -> float:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        module(*batch).backward()
    return counter.get_total_flops()


def _flop_counter_on_meta(module: nn.Module, batch: Batch, decoder: Decoder | None = None) -> float:
    return _flop_counter(module.to("meta"), _on_meta(batch))


def _fvcore(module: nn.Module, batch: Batch, decoder: Decoder | None = None) -> float:
    analysis = _imported("fvcore.nn").FlopCountAnalysis(module, batch)
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    return STEP * 2 * analysis.total()  # its flop is a fused multiply and add


def _calflops(module: nn.Module, batch: Batch, decoder: Decoder | None = None) -> float:
    found = _imported("calflops").calculate_flops(
        module, args=list(batch), include_backPropagation=True, print_results=False, output_as_string=False
    )
    return found[0]


def _torchinfo(module: nn.Module, batch: Batch, decoder: Decoder | None = None) -> float:
    return STEP * 2 * _imported("torchinfo").summary(module, input_data=list(batch), verbose=0).total_mult_adds


def _thop(module: nn.Module, batch: Batch, decoder: Decoder | None = None) -> float:
    return STEP * 2 * _imported("thop").profile(module, inputs=batch, verbose=False)[0]


def _ptflops(module: nn.Module, batch: Batch, decoder: Decoder | None = None, *, backend: str = "pytorch") -> float:
    named = _Named(module, len(batch))
    found = _imported("ptflops").get_model_complexity_info(
        named,
        (1,),
        as_strings=False,
        print_per_layer_stat=False,
        input_constructor=lambda _: dict(zip(named.names, batch, strict=True)),
        backend=backend,
    )
    return STEP * 2 * found[0]


def _ptflops_aten(module: nn.Module, batch: Batch, decoder: Decoder | None = None) -> float:
    return _ptflops(module.to("meta"), _on_meta(batch), backend="aten")


class _Named(nn.Module):
    """A module that is handed its inputs by name, as ptflops does it."""

    def __init__(self, module: nn.Module, n_inputs: int) -> None:
        super().__init__()
        self.module = module
        self.names = [f"input{i}" for i in range(n_inputs)]

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.module(*(inputs[name] for name in self.names))


def _deepspeed(module: nn.Module, batch: Batch, decoder: Decoder | None = None) -> float:
    profiler = _imported("deepspeed.profiling.flops_profiler")
    found = profiler.get_model_profile(module, args=list(batch), print_profile=False, as_string=False)
    return STEP * found[0]


def _llm_analysis(module: nn.Module, batch: Batch, decoder: Decoder | None) -> float:
    if decoder is None:
        raise _NotForThis
    return STEP * llm_analysis_of(decoder).get_num_flops_fwd_total(decoder.batch_size, decoder.length)


def llm_analysis_of(decoder: Decoder) -> Any:
    """llm-analysis set up for a decoder in 16 bits; the GPU that it asks for changes neither FLOPs nor bytes."""
    config = _imported("llm_analysis.config")
    model = config.ModelConfig(
        "model",
        decoder.n_layers,
        decoder.n_heads,
        decoder.d_model,
        decoder.vocab_size,
        decoder.length,
        decoder.n_kv_heads,
        decoder.n_heads // decoder.n_kv_heads,
        decoder.d_ff,
        expansion_ratio=decoder.d_ff / decoder.d_model,
    )
    gpu = config.get_gpu_config_by_name("a100-sxm-80gb")
    return _imported("llm_analysis.analysis").LLMAnalysis(model, gpu)


def _six_n(module: nn.Module, batch: Batch, decoder: Decoder | None) -> float:
    if batch[0].dim() == 4:
        raise _NotForThis  # a convolution uses each weight at many positions
    tokens = batch[0].shape[:-1].numel() if batch[0].is_floating_point() else batch[0].numel()
    # Of a mixture of experts, N is what a token meets.
    idle = sum(
        (1 - part.share) * (part.up.numel() + part.down.numel())
        for part in module.modules()
        if isinstance(part, ExpertChoice)
    )
    return 6 * (sum(parameter.numel() for parameter in module.parameters()) - idle) * tokens


def _palm(module: nn.Module, batch: Batch, decoder: Decoder | None) -> float:
    if decoder is None:
        raise _NotForThis
    attention = 12 * decoder.n_layers * decoder.d_model * decoder.length * batch[0].numel()
    return _six_n(module, batch, decoder) + attention


def _imported(name: str) -> Any:
    return importlib.import_module(name)


# Name -> (package that brings it, how it is asked).
CALCULATORS: dict[str, tuple[str | None, Callable[..., float]]] = {
    "napkin": (None, _napkin),
    "FlopCounterMode": (None, _flop_counter),
    "FlopCounterMode, on meta": (None, _flop_counter_on_meta),
    "calflops": ("calflops", _calflops),
    "DeepSpeed's profiler": ("deepspeed", _deepspeed),
    "fvcore": ("fvcore", _fvcore),
    "ptflops": ("ptflops", _ptflops),
    "ptflops, aten, on meta": ("ptflops", _ptflops_aten),
    "thop": ("thop", _thop),
    "torchinfo": ("torchinfo", _torchinfo),
    "llm-analysis": ("llm-analysis", _llm_analysis),
    "rule 6·N·T": (None, _six_n),
    "rule 6·N·T + 12·L·d·s·T": (None, _palm),
}
