# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""What `gpu_speed.py` measures: each case by its contenders, each a function that prepares a run and returns it."""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu_training import plain_step
from napkin.inference import Engine, Request, Sampling
from napkin.inference.generation import cache_for, prefill
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.planning.planner import resolve
from napkin.planning.step.machine import ThisMachine
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.train_step.step import build_train_state
from napkin.train_step.step_graph import record_cuda_graph
from plain_models import PlainGPT2, PlainLlama, PlainNanochat

Run = Callable[[], object]


class Result(msgspec.Struct, frozen=True):
    """The median of the timed runs."""

    speed: float
    unit: str
    seconds: float


@dataclass(frozen=True)
class Sizes:
    """A model and what it is given."""

    model: ModelConfig
    rows: int
    """Sequences of a micro-batch, or of a batch that is decoded."""
    micro_batches: int = 1
    new_tokens: int = 0
    optimizer: str = "adamw"
    warm_up: int = 5
    """At least the steps after which a graph has been recorded."""
    timed: int = 10


GPT2 = ModelConfig(
    50304, 1024, d_model=768, n_layers=12, n_heads=12, positions="learned", norm="layer", feed_forward="gelu_tanh",
    biases="all", embedding_scale=1.0, tie_embeddings=True,
)  # fmt: skip
NANOCHAT = ModelConfig(
    65536, 2048, d_model=768, n_layers=12, n_heads=6, feed_forward="relu_squared", d_ff=3072, norm="rms",
    qk_norm="head", logit_softcap=15.0, tie_embeddings=False,
)  # fmt: skip
LLAMA = ModelConfig(
    128256, 8192, d_model=4096, n_layers=1, n_heads=32, n_kv_heads=8, d_ff=14336, norm="rms", tie_embeddings=False
)
SIZES = {
    "GPT-2 small, speedrun step": Sizes(GPT2, 64, 8),
    "nanochat d12, step": Sizes(NANOCHAT, 32, 8, optimizer="muon"),
    "8B block, step": Sizes(replace(LLAMA, vocab_size=1024), 2),
    "1B, decode 16 sequences": Sizes(
        replace(LLAMA, vocab_size=32000, d_model=2048, n_layers=16, d_ff=8192), 16, new_tokens=128, warm_up=1, timed=3
    ),
    "1B, prefill 8 × 2048": Sizes(
        replace(LLAMA, vocab_size=32000, d_model=2048, n_layers=16, d_ff=8192, context_length=2048), 8, warm_up=2
    ),
}
PROMPT = 64
"""Tokens of a prompt whose continuation is decoded."""


def sizes_of(case: str, *, tiny: bool) -> Sizes:
    """Return the sizes of a case, or such as a CPU computes in a moment."""
    sizes = SIZES[case]
    if not tiny:
        return sizes
    heads = {"n_heads": 4, "n_kv_heads": None if sizes.model.n_kv_heads is None else 2}
    d_ff = None if sizes.model.d_ff is None else 64
    model = replace(
        sizes.model, vocab_size=128, context_length=96, d_model=32, n_layers=min(2, sizes.model.n_layers), d_ff=d_ff,
        **heads,
    )  # fmt: skip
    few = {"micro_batches": min(2, sizes.micro_batches), "new_tokens": min(8, sizes.new_tokens)}
    return replace(sizes, model=model, rows=2, warm_up=1, timed=2, **few)


def measure(case: str, who: str, *, tiny: bool, device: str) -> Result:
    """Prepare a contender and time it."""
    sizes, contender = sizes_of(case, tiny=tiny), CASES[case][who]
    torch.manual_seed(0)
    work, seconds = contender.prepare(sizes, device), []
    for number in range(sizes.warm_up + sizes.timed):
        begin = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= sizes.warm_up:
            seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds)
    tokens = sizes.rows * (sizes.new_tokens or sizes.micro_batches * sizes.model.context_length)
    return Result(tokens / median, "tokens/s", median)


def batch(sizes: Sizes, device: str) -> tuple[Tensor, Tensor]:
    """Return random tokens of a whole step, and those that follow them."""
    shape = sizes.rows * sizes.micro_batches, sizes.model.context_length + 1
    tokens = torch.randint(sizes.model.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def ours(sizes: Sizes, device: str, *, kernels: str = "plain", compiled: bool = False, graph: bool = False) -> Run:
    """Prepare napkin's step."""
    inputs, targets = batch(sizes, device)
    training: Any = {"batch_size": len(inputs), "micro_batch_size": sizes.rows, "kernels": kernels, "compile": "off"}
    training |= {"precision": "bf16" if device == "cuda" else "fp32", "device": device}
    optimizer = OptimizerConfig(name=sizes.optimizer, warmup_steps=0)
    recipe = Recipe(model=sizes.model, optimizer=optimizer, training=TrainingConfig(**training))
    resolved = resolve(recipe, ThisMachine(device=device))  # pyright: ignore[reportArgumentType]
    recorder = record_cuda_graph if graph else None
    state, numbers = build_train_state(resolved, compiled=compiled, recorder=recorder), iter(range(10**9))
    return lambda: state.step(next(numbers), inputs, targets)


def plain(sizes: Sizes, device: str, *, compiled: bool = True) -> Run:
    """Prepare the loop that people copy, around a plain model."""
    inputs, targets = batch(sizes, device)
    model = plain_model(sizes.model, device)
    called = torch.compile(model) if compiled and device == "cuda" else model
    optimizers = None
    if sizes.optimizer == "muon":
        matrices = [p for p in model.layers.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if all(p is not each for each in matrices)]
        optimizers = [torch.optim.Muon(matrices, lr=3e-3), torch.optim.AdamW(others, lr=3e-4, fused=True)]
    step = plain_step(called, sizes.rows, device, optimizers)  # pyright: ignore[reportArgumentType]
    return lambda: step(inputs, targets)


def plain_model(config: ModelConfig, device: str) -> nn.Module:
    """Return the plain model of a config's shape."""
    sizes = config.vocab_size, config.context_length, config.n_layers, config.d_model, config.n_heads
    with torch.device(device):
        if config.positions == "learned":
            return PlainGPT2(*sizes)
        if config.qk_norm != "none":
            return PlainNanochat(*sizes)
        return PlainLlama(*sizes, config.n_kv_heads or config.n_heads, config.d_ff or 4 * config.d_model)


def nanochat(sizes: Sizes, device: str) -> Run:
    """Prepare nanochat's model with its own optimizers."""
    from nanochat.gpt import GPT, GPTConfig

    config, (inputs, targets) = sizes.model, batch(sizes, device)
    shape = {"n_layer": config.n_layers, "n_head": config.n_heads, "n_kv_head": config.n_heads}
    with torch.device("meta"):
        model = GPT(
            GPTConfig(sequence_len=config.context_length, vocab_size=config.vocab_size, n_embd=config.d_model, **shape)
        )
    model.to_empty(device=device)
    model.init_weights()
    made = model.setup_optimizers() if hasattr(model, "setup_optimizers") else model.setup_optimizer()
    optimizers = list(made) if isinstance(made, (list, tuple)) else [made]
    step = plain_step(torch.compile(model, dynamic=False), sizes.rows, device, optimizers)  # pyright: ignore[reportArgumentType]
    return lambda: step(inputs, targets)


def torchtitan(sizes: Sizes, device: str) -> Run:
    """Prepare torchtitan's Llama 3, each block compiled as it does, with a loss in fp32."""
    from torchtitan.models.llama3 import Transformer as Theirs
    from torchtitan.models.llama3 import TransformerModelArgs

    config, (inputs, targets) = sizes.model, batch(sizes, device)
    arguments = TransformerModelArgs(
        dim=config.d_model, n_layers=config.n_layers, n_heads=config.n_heads, n_kv_heads=config.n_kv_heads,
        vocab_size=config.vocab_size, max_seq_len=config.context_length, ffn_dim_multiplier=1.3, multiple_of=1024,
    )  # fmt: skip
    with torch.device(device):
        model = Theirs(arguments)
    model.init_weights()
    for name, block in model.layers.named_children():
        model.layers.register_module(name, torch.compile(block, fullgraph=True))  # pyright: ignore[reportArgumentType]

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(self.model(tokens).flatten(0, 1).float(), targets.flatten())

    step = plain_step(WithLoss(), sizes.rows, device)
    return lambda: step(inputs, targets)


def products_dtype(device: str) -> torch.dtype:
    """Return the format that a device multiplies in."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def prompts(sizes: Sizes) -> list[list[int]]:
    """Return random prompts: those to continue, or whole contexts."""
    length = min(PROMPT, sizes.model.context_length // 2) if sizes.new_tokens else sizes.model.context_length
    draws = torch.Generator().manual_seed(0)
    return torch.randint(sizes.model.vocab_size, (sizes.rows, length), generator=draws).tolist()


def our_decoding(sizes: Sizes, device: str) -> Run:
    """Prepare napkin's engine, which takes all requests at once."""
    model = Transformer(sizes.model, dtype=products_dtype(device)).eval().to(device)
    asked = [Request(each, sizes.new_tokens, Sampling(temperature=0)) for each in prompts(sizes)]

    def work() -> None:
        engine = Engine(model, max_running=sizes.rows)
        for request in asked:
            engine.submit(request)
        engine.run()

    return work


def our_prefill(sizes: Sizes, device: str) -> Run:
    """Prepare a pass over all prompts, into a cache."""
    model, asked = Transformer(sizes.model, dtype=products_dtype(device)).eval().to(device), prompts(sizes)
    return lambda: prefill(model, asked, cache_for(model, sizes.rows, sizes.model.context_length))


def plain_llama(sizes: Sizes, device: str) -> PlainLlama:
    """Return the plain model in the format that it is read in."""
    model = plain_model(sizes.model, device).eval().to(products_dtype(device))
    assert isinstance(model, PlainLlama)
    return model


def plain_decoding(sizes: Sizes, device: str) -> Run:
    """Prepare a static cache and a compiled step of one token, as gpt-fast has them."""
    model, tokens = plain_llama(sizes, device), torch.tensor(prompts(sizes), device=device)
    length = tokens.shape[1]
    cache = model.cache(sizes.rows, length + sizes.new_tokens)
    step = torch.compile(model.next, mode="reduce-overhead") if device == "cuda" else model.next

    @torch.no_grad()
    def work() -> None:
        token = model.next(tokens, cache, torch.arange(length, device=device))
        for place in range(length, length + sizes.new_tokens - 1):
            token = step(token.clone(), cache, torch.tensor([place], device=device))

    return work


def plain_prefill(sizes: Sizes, device: str) -> Run:
    """Prepare a compiled pass over all prompts, into a static cache."""
    model, tokens = plain_llama(sizes, device), torch.tensor(prompts(sizes), device=device)
    cache = model.cache(*tokens.shape)
    step = torch.compile(model.next) if device == "cuda" else model.next
    places = torch.arange(tokens.shape[1], device=device)
    return torch.no_grad()(lambda: step(tokens, cache, places))


def vllm(sizes: Sizes, device: str) -> Run:
    """Prepare vLLM with weights that it draws itself."""
    from vllm import LLM, SamplingParams

    config = sizes.model
    described = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "vocab_size": config.vocab_size, "hidden_size": config.d_model, "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers, "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads, "max_position_embeddings": config.context_length,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="napkin-vllm-"))
    (folder / "config.json").write_text(json.dumps(described))
    engine = LLM(
        str(folder), load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
        max_model_len=config.context_length, max_num_seqs=sizes.rows,
    )  # fmt: skip
    settings = SamplingParams(temperature=0, max_tokens=sizes.new_tokens or 1, ignore_eos=True, detokenize=False)
    # A token is generated after each prompt: it has to leave room for it.
    room = config.context_length - (sizes.new_tokens or 1)
    asked: Any = [{"prompt_token_ids": each[:room]} for each in prompts(sizes)]
    return lambda: engine.generate(asked, settings, use_tqdm=False)


@dataclass(frozen=True)
class Contender:
    """Prepares a run on a device."""

    prepare: Callable[[Sizes, str], Run]
    package: str | None = None
    """What has to be installed for it."""
    on_gpu_only: bool = False


OURS = {
    "napkin": Contender(ours),
    "napkin, compiled": Contender(partial(ours, compiled=True), on_gpu_only=True),
    "napkin, triton": Contender(partial(ours, kernels="triton"), "triton", on_gpu_only=True),
    "napkin, triton, CUDA graph": Contender(partial(ours, kernels="triton", graph=True), "triton", on_gpu_only=True),
}
PLAIN = {"plain PyTorch, compiled": Contender(plain)}
VLLM = {"vLLM": Contender(vllm, "vllm", on_gpu_only=True)}
CASES: dict[str, dict[str, Contender]] = {
    "GPT-2 small, speedrun step": {**OURS, **PLAIN},
    "nanochat d12, step": {**OURS, **PLAIN, "nanochat": Contender(nanochat, "nanochat", on_gpu_only=True)},
    "8B block, step": {**OURS, **PLAIN, "torchtitan": Contender(torchtitan, "torchtitan", on_gpu_only=True)},
    "1B, decode 16 sequences": {
        "napkin": Contender(our_decoding), "plain PyTorch, compiled": Contender(plain_decoding), **VLLM
    },
    "1B, prefill 8 × 2048": {
        "napkin": Contender(our_prefill), "plain PyTorch, compiled": Contender(plain_prefill), **VLLM
    },
}  # fmt: skip
