"""A tiny random model as a server has it, and the program that serves it."""

import json
import math
from typing import Any

import torch

from napkin.inference.loaded_model import LoadedModel
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.tokenizer.bpe import ByteTokenizer

SEPARATOR = "<|endoftext|>"
CONTEXT = 2048


def tiny_served_model() -> LoadedModel:
    """The same at each call; tokens are bytes."""
    tokenizer = ByteTokenizer([SEPARATOR])
    config = ModelConfig(vocab_size=tokenizer.vocab_size, context_length=CONTEXT, d_model=32, n_layers=2, n_heads=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Transformer(config).eval()
    with torch.no_grad():
        # Sure of some tokens: which one is likeliest does not hang on rounding.
        model.head_weight.mul_(8)
    return LoadedModel.of(model, tokenizer, name="tiny")


def poison(model: Transformer, token: int) -> None:
    """Where a token is read, the model computes NaN."""
    model.embedding.register_forward_hook(
        lambda _, tokens, found: found.masked_fill((tokens[0] == token)[..., None], math.nan)
    )


def serving_program(
    *,
    key: str | None = None,
    poisoned: int | None = None,
    lookup: int = 0,
    prefixes: str = "",
    calling: str = "",
    **limits: Any,
) -> str:
    """Python code that serves the model on a free port and prints the address; `poisoned` is a token, see `poison`,
    `lookup` the longest n-gram whose four next tokens are proposed for each pass, `prefixes` a folder for prefixes, and
    `calling` the template of a model that calls functions."""
    return f"""
import json, pathlib, torch
from napkin.inference.prefix_store import PrefixStore
from napkin.inference.settings import Speculation
from napkin.serving import Limits, serve
from oracles.calling_model import calling_model
from oracles.served_model import poison, tiny_served_model
torch.set_num_threads(1)
opened = calling_model({calling!r}) if {bool(calling)} else tiny_served_model()
{"" if poisoned is None else f"poison(opened.model, {poisoned})"}
engine = opened.engine(Speculation(lookup={lookup}, proposed={4 if lookup else None}), max_running=8)
limits = Limits(**json.loads({json.dumps(json.dumps(limits))}))
prefixes = PrefixStore(10**7, pathlib.Path({prefixes!r})) if {bool(prefixes)} else None
on_start = lambda address: print(address, flush=True)
serve(opened, engine, port=0, key={key!r}, limits=limits, prefixes=prefixes, on_start=on_start)
"""
