"""How long each calculator takes for a whole model, and how much memory: each in a process of its own."""

import time
from typing import Any

import torch
from torch import nn

from calculators.flops import CALCULATORS
from calculators.models import Batch
from calculators.processes import available, in_process, peak_rss_bytes
from napkin import count
from oracles.torch_models import GPT2, Llama  # pyright: ignore[reportMissingImports]

MODELS = ("GPT-2 small", "GPT-2 XL", "Llama-3-70B-shaped")
FORMULAS = ("llm-analysis", "rule 6·N·T", "rule 6·N·T + 12·L·d·s·T")
NAPKIN = "napkin, whole step"
LIMIT_SECONDS = 180


def table() -> dict[str, dict[str, Any]]:
    """Calculator -> model -> two runs of [seconds of processor time, bytes of RSS], or why there are none."""
    results: dict[str, dict[str, Any]] = {
        "torch alone": {"GPT-2 small": _twice("calculators.speed:baseline")},
        NAPKIN: {name: _twice("calculators.speed:of_napkin", name) for name in MODELS},
    }
    for calculator, (package, _) in CALCULATORS.items():
        # Here every model is on the meta device.
        if available(package) and calculator not in (*FORMULAS, "napkin", "FlopCounterMode, on meta"):
            results[calculator.removesuffix(", on meta")] = {
                name: _twice("calculators.speed:of_calculator", calculator, name) for name in MODELS
            }
    return results


def _twice(function: str, *arguments: str) -> Any:
    first = in_process(function, *arguments, seconds=LIMIT_SECONDS)
    if isinstance(first, str):
        return first
    second = in_process(function, *arguments, seconds=LIMIT_SECONDS)
    return [first] if isinstance(second, str) else [first, second]


def baseline() -> list[float]:
    """RSS of a process that has imported torch and made the small model."""
    _built("GPT-2 small")
    return [0.0, peak_rss_bytes()]


def of_napkin(name: str) -> list[float]:
    """Forward and backward pass and AdamW's update: FLOPs and bytes of every operator, peak bytes."""
    begin = time.process_time()
    module, batch = _built(name)
    ledger = count(module, batch, optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True))
    seconds = time.process_time() - begin
    assert ledger.flops
    assert ledger.peak_bytes
    return [seconds, peak_rss_bytes()]


def of_calculator(calculator: str, name: str) -> list[float]:
    """What the calculator offers: FLOPs, of a forward pass in most."""
    begin = time.process_time()
    found = CALCULATORS[calculator][1](*_built(name))
    seconds = time.process_time() - begin
    assert found > 0
    return [seconds, peak_rss_bytes()]


def _built(name: str) -> tuple[nn.Module, Batch]:
    with torch.device("meta"):
        if name == "GPT-2 small":
            module: nn.Module = GPT2()
        elif name == "GPT-2 XL":
            module = GPT2(n_layers=48, d_model=1600, n_heads=25)
        else:
            module = Llama(128256, 1024, 80, 8192, 64, 8, 28672)
        tokens = torch.zeros(1, 1024, dtype=torch.int64)
        return module, (tokens, tokens.clone())
