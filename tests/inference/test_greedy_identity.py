"""Greedy decoding beside that of `transformers`, which is not a dependency: 200 prompts of each family that loads."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from napkin.inference.engine import Engine
from napkin.inference.generation import generate
from napkin.inference.requests import Request
from napkin.inference.settings import Sampling
from napkin.model.huggingface import load_huggingface
from napkin.model.transformer import Transformer
from peers import peer

N_PROMPTS, N_TOKENS, VOCAB_SIZE = 200, 24, 53
GREEDY = Sampling(temperature=0)
SHAPE = {
    "vocab_size": VOCAB_SIZE, "max_position_embeddings": 64, "hidden_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "GPT2": {"vocab_size": VOCAB_SIZE, "n_positions": 64, "n_embd": 24, "n_layer": 3, "n_head": 3},
    "Llama": SHAPE,
    "Mistral": {**SHAPE, "sliding_window": 9},
    "Qwen2": SHAPE,
    "Qwen3": {**SHAPE, "head_dim": 10},
    "Mixtral": {**SHAPE, "num_local_experts": 5, "sliding_window": 10},
    "Olmo2": SHAPE,
    "Gemma2": {
        **SHAPE, "head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 4.0, "attn_implementation": "eager",
    },
    "Granite": {**SHAPE, "embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
}  # fmt: skip


def theirs_of(family: str) -> Any:
    """A model with random weights that are large enough for likeliest tokens to stand out."""
    transformers = peer("transformers")
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**FAMILIES[family], **ends))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def prompts() -> list[list[int]]:
    """Of 1 to 25 tokens, eight of each length."""
    draw = random.Random(0)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(1 + number // 8)] for number in range(N_PROMPTS)]


@torch.inference_mode()
def uncached(model: Transformer, batch: list[list[int]]) -> list[list[int]]:
    """Each token by a pass over all before it."""
    tokens = torch.tensor(batch)
    for _ in range(N_TOKENS):
        tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), dim=1)
    return tokens[:, len(batch[0]) :].tolist()


@pytest.mark.peers
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    theirs, asked = theirs_of(family), prompts()
    theirs.save_pretrained(tmp_path)
    ours = load_huggingface(tmp_path).eval()
    expected: list[list[int]] = []
    without_cache: list[list[int]] = []
    for first in range(0, N_PROMPTS, 8):
        batch = asked[first : first + 8]
        inputs = torch.tensor(batch)
        found = theirs.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=N_TOKENS, do_sample=False, pad_token_id=0
        )
        expected += found[:, len(batch[0]) :].tolist()
        without_cache += uncached(ours, batch)
    assert without_cache == expected
    assert [list(generate(ours, prompt, N_TOKENS, GREEDY)) for prompt in asked] == expected

    engine = Engine(ours, max_running=16, prefill_chunk=16, block_size=8)
    completions = [engine.submit(Request(prompt, N_TOKENS, GREEDY)) for prompt in asked]
    engine.run()
    assert [completion.tokens for completion in completions] == expected
    # Otherwise nothing would be compared but repetition.
    assert len({tuple(ids) for ids in expected}) > N_PROMPTS // 4
