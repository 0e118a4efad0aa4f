"""What each switch of the model costs: parameters, FLOPs and peak bytes of a training step by count, seconds measured.

The table of docs/models.md. Each row is the default recipe's model, 4,096 words, batch 4, with one thing changed; steps
are taken in turns with the unchanged model's: the ratio is the median of the pairs'.

    python benchmarks/model_switches.py [--clock cpu --threads 1]

`--clock cpu` sums the seconds of all threads: comparable on a machine that is busy.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from napkin.accounting.counting import count
from napkin.hardware import Sampling, Timed, sample_in_turns
from napkin.hardware.host import detect_host
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.optim.adam import AdamW
from napkin.units import format_bytes, format_count, format_flops
from result_files import heading
from turns import BRACKETS, ratio_spread, spread

BASE = ModelConfig(vocab_size=4096)
BATCH_SIZE = 4
SWITCHES: dict[str, dict[str, Any]] = {
    "the default: rope, rms, swiglu, pre-norm, tied, sdpa": {},
    "tie_embeddings = false": {"tie_embeddings": False},
    "n_kv_heads = 1 (multi-query)": {"n_kv_heads": 1},
    "positions = learned": {"positions": "learned"},
    "positions = sinusoidal": {"positions": "sinusoidal"},
    "positions = alibi": {"positions": "alibi"},
    "positions = none": {"positions": "none"},
    "rope_pairing = interleaved": {"rope_pairing": "interleaved"},
    "rope_scaling = yarn": {"rope_scaling": "yarn", "rope_factor": 4.0},
    "attention = plain": {"attention": "plain"},
    "attention_window = 64": {"attention_window": 64},
    "attention_softcap = 50 (plain)": {"attention": "plain", "attention_softcap": 50.0},
    "qk_norm = head": {"qk_norm": "head"},
    "qk_norm = all_heads": {"qk_norm": "all_heads"},
    **{
        f"feed_forward = {kind}": {"feed_forward": kind}
        for kind in ("geglu", "geglu_tanh", "reglu", "glu", "silu", "gelu", "gelu_tanh", "relu", "relu_squared")
    },
    "norm = layer": {"norm": "layer"},
    "norm = none": {"norm": "none"},
    "norm = layer, biases = all": {"norm": "layer", "biases": "all"},
    "biases = qkv": {"biases": "qkv"},
    **{f"block = {kind}": {"block": kind} for kind in ("post", "sandwich", "reordered", "parallel")},
    "dropout = 0.1": {"dropout": 0.1},
    "n_experts = 8": {"n_experts": 8},
    "n_experts = 8, expert_capacity = 1.25": {"n_experts": 8, "expert_capacity": 1.25},
    "n_experts = 16, n_shared_experts = 2, d_expert = 176, experts_per_token = 4": {
        "n_experts": 16, "n_shared_experts": 2, "d_expert": 176, "experts_per_token": 4
    },
    "z_weight = 1e-4": {"z_weight": 1e-4},
    "mup_base_d_model = 64": {"mup_base_d_model": 64},
}  # fmt: skip


class LossOf(nn.Module):
    """The model as a module that returns its loss."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(tokens, targets)


class Trained:
    """A model with its optimizer and batch."""

    def __init__(self, config: ModelConfig) -> None:
        self.module = LossOf(Transformer(config))
        tokens = torch.randint(4096, (BATCH_SIZE, 257), generator=torch.Generator().manual_seed(0))
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.optimizer = AdamW(self.module.parameters())

    def step(self) -> None:
        self.module(*self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of the switches to measure; all by default")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--threads", type=int, default=detect_host().cores)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    now = time.perf_counter if options.clock == "wall" else time.process_time

    def clock(step: Callable[[], object], steps: int) -> float:
        begin = now()
        for _ in range(steps):
            step()
        return (now() - begin) / steps

    heading("What each switch of the model costs", BRACKETS)
    print("| switch | parameters | FLOPs per step | peak bytes | seconds | × |")
    print("|---|---|---|---|---|---|")
    reference = Trained(BASE)
    chosen = {name: each for name, each in SWITCHES.items() if any(part in name for part in options.names or [""])}
    for name, changes in chosen.items():
        trained = Trained(dataclasses.replace(BASE, **changes))
        ledger = count(trained.module, trained.batch, optimizer=AdamW)
        steps = [Timed(trained.step), Timed(reference.step)]
        seconds, of_reference = sample_in_turns(steps, clock, Sampling(seconds=0, least=options.rounds))
        both = f"{spread(seconds, '{:.3f}'.format)} | {ratio_spread(seconds, of_reference)}"
        print(
            f"| {name} | {format_count(ledger.parameters)} | {format_flops(ledger.flops)} | "
            f"{format_bytes(ledger.peak_bytes)} | {both} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
