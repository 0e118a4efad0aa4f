"""Peak bytes of a LoRA step: napkin beside torch with peft and transformers, and its count.

One model in one folder, with the shape of a small Llama: 4 layers, width 256, vocabulary 8,192; adapters of rank 8 on
all matrices of its blocks; one batch of 8 sequences of 256 tokens that all count; AdamW. Each contender is a process of
its own. Peak bytes are those of tensors in a step, as `napkin.accounting.recording` watches them, the same for all.
peft's model is held in bf16 where the step is in bf16, as napkin holds its frozen matrices. The first losses say that
all compute the same.

    .venv-peers/bin/python benchmarks/alignment_adapters.py        # a minute on two quiet cores

Without peft and transformers, napkin's rows stand alone. The table is also written to benchmarks/results/.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from napkin.accounting.recording import record
from napkin.chats.token_sequence import Example, TokenSequence
from napkin.model.config import ModelConfig
from napkin.model.huggingface.convert import load_huggingface_parts, read_huggingface_config, save_huggingface
from napkin.model.transformer import Transformer
from napkin.recipe.precision import Precision
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.recipe.tuning_recipe import AdapterConfig, TuningRecipe
from napkin.train_step.step import build_train_state
from napkin.tuning.example_method import SupervisedObjective
from napkin.tuning.example_plan import count_examples
from napkin.tuning.packing import micro_batches_of
from napkin.tuning.sequence_step import totals_of, train_on_examples
from napkin.units import format_bytes
from result_files import heading, no_options, write_result
from turns import BRACKETS, seconds_of, spread

MODEL = ModelConfig(vocab_size=8192, context_length=512, d_model=256, n_layers=4, n_heads=4, embedding_scale=1.0)
N_SEQUENCES, LENGTH, RANK, ALPHA = 8, 256, 8, 16.0
OURS: dict[str, tuple[Any, Any]] = {
    f"napkin {kind} {precision}": (kind, precision) for precision in ("fp32", "bf16") for kind in ("lora", "dora")
}
THEIRS = {f"peft {kind} {precision}": (kind, precision) for precision in ("fp32", "bf16") for kind in ("lora", "dora")}
NEEDED = ("peft", "transformers")
STEPS = 6
Step = Callable[[], float]


def main() -> None:
    """Measure each contender in a process of its own; print and keep the table."""
    if len(sys.argv) == 3:
        print(json.dumps(measured(sys.argv[1], Path(sys.argv[2]))))
        return
    no_options(__doc__)
    head = heading("A LoRA step beside peft", BRACKETS, packages=NEEDED)
    missing = [name for name in NEEDED if find_spec(name) is None]
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_huggingface(Transformer(MODEL), Path(folder) / "model")
        for name in [*OURS, *([] if missing else THEIRS)]:
            command = [sys.executable, __file__, name, f"{folder}/model"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[name] = json.loads(done.stdout.splitlines()[-1])
    lines = [
        "| who | first loss | trained | peak bytes | count | / peft | ms per step |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        peer = found.get(name.replace("napkin", "peft"), {})
        ratio = f"{row['peak'] / peer['peak']:.2f}" if peer and name in OURS else ""
        count = f"{row['count'] / row['peak']:.4f} of it" if "count" in row else ""
        lines.append(
            f"| {name} | {row['loss']:.4f} | {int(row['trained']):,} | {format_bytes(int(row['peak']))} | {count} | "
            f"{ratio} | {spread([1000 * each for each in row['seconds']], '{:.0f}'.format)} |"
        )
    if missing:
        lines.append(f"\n{', '.join(missing)} not installed: peft is left out")
    print("\n".join(lines))
    write_result("alignment-adapters", [*head, *lines])


def measured(name: str, folder: Path) -> dict[str, Any]:
    """The first loss, the peak of a step, and its seconds."""
    torch.manual_seed(0)
    more: dict[str, Any] = {}
    if name in OURS:
        module, step, more["count"] = napkin_step(*OURS[name], folder)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module, step = peft_step(*THEIRS[name], folder)
    loss = step()
    peak = record(module, step, warm_up=1).peak_bytes
    seconds = [seconds_of(step) for _ in range(STEPS)]
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    return {"loss": loss, "peak": peak, "seconds": seconds, "trained": trained, **more}


def batch() -> np.ndarray:
    """The sequences that all train on."""
    return np.random.default_rng(0).integers(3, MODEL.vocab_size, (N_SEQUENCES, LENGTH))


def napkin_step(kind: Any, precision: Any, folder: Path) -> tuple[torch.nn.Module, Step, float]:
    """napkin's model, its step, and the peak bytes that are counted of it."""
    recipe = TuningRecipe(
        model=read_huggingface_config(folder),
        optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=0),
        training=TrainingConfig(batch_size=N_SEQUENCES, device="cpu", kernels="compiled"),
        adapter=AdapterConfig(kind, rank=RANK, alpha=ALPHA),
    )
    resolved = ResolvedRecipe(recipe, Precision(precision, "cpu"))
    examples: list[Example] = [(TokenSequence(tokens, np.arange(LENGTH) > 0),) for tokens in batch()]
    settings: dict[str, Any] = {"max_tokens": N_SEQUENCES * LENGTH, "packing": "padded"}
    parts = micro_batches_of(examples, row_length=MODEL.context_length, **settings)
    counted = count_examples(resolved, parts, totals_of(parts), SupervisedObjective()).peak_bytes
    state = build_train_state(resolved, initialize=lambda config, parts: load_huggingface_parts(config, parts, folder))
    numbers = iter(range(1000))

    def step() -> float:
        return train_on_examples(state, next(numbers), examples, SupervisedObjective(), **settings).loss

    return state.model, step, counted


def peft_step(kind: str, precision: str, folder: Path) -> tuple[torch.nn.Module, Step]:
    """peft's model and a step as its users write it."""
    import peft  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules="all-linear", use_dora=kind == "dora", task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(model, config).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    tokens = torch.from_numpy(batch())
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()

    def step() -> float:
        with autocast:
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return model, step


if __name__ == "__main__":
    main()
