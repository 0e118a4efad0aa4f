"""Ledgers of whole models that several tests read: GPT-2 small and XL, a Llama-like of 125 M parameters."""

from functools import partial

import torch

from napkin import Ledger, count
from napkin.hardware.target import Target
from oracles.torch_models import GPT2, Llama

FUSED_ADAMW = partial(torch.optim.AdamW, fused=True)


def tokens_of(batch_size: int, length: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets; only their shapes matter."""
    tokens = torch.zeros(batch_size, length, dtype=torch.int64)
    return tokens, tokens.clone()


def gpt2_ledger() -> Ledger:
    """One sequence of 1,024 tokens in fp32 with fused AdamW."""
    with torch.device("meta"):
        return count(GPT2(), tokens_of(1), optimizer=FUSED_ADAMW)


def llama_ledger() -> Ledger:
    """The same of the Llama-like model."""
    with torch.device("meta"):
        model = Llama()
    return count(model, tokens_of(1), optimizer=FUSED_ADAMW)


def gpt2_xl_ledger(*, checkpointing: bool, n_layers: int = 48, target: Target = "cpu") -> Ledger:
    """Eight sequences of 1,024 tokens, all in bf16."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = GPT2(n_layers=n_layers, d_model=1600, n_heads=25, checkpointing=checkpointing)
    torch.set_default_dtype(torch.float32)
    return count(model, tokens_of(8), optimizer=FUSED_ADAMW, target=target)
