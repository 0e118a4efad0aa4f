"""Estimators of training memory on scripts that people ran, beside what their logs state and what napkin rehearses.

    python benchmarks/memory_estimators.py --programs FOLDER --answers FOLDER --venvs FOLDER [--only NAME] [--write]

`--programs` and `--answers` are those of `compiled_programs.py`: scripts of openai/parameter-golf, and what `napkin
rehearse` said of them. `--venvs` holds a virtual environment for each package of PyPI, of its name, in which torch and
accelerate can be imported too; packages without one are left out, and named. The model of a script is built with the
sizes that its log states, on the meta device, where that fails on the CPU. Each estimator is given what it asks for:
the module, its number of parameters or its sizes, the batch of one of eight ranks, bf16 where it has a format of
computation, fp32 for weights where it has one, AdamW. What it has no argument for, it is not told: none has one for
`torch.compile`, and the optimizer of these scripts is mostly Muon. An estimate has a minute of processor time, and an
estimator `--minutes` for all scripts; what is not done by then is left out.
"""

# pyright: reportMissingImports=false
# The packages are in environments of their own.

import argparse
import csv
import importlib.metadata
import inspect
import json
import os
import runpy
import signal
import statistics
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from compiled_programs import PUBLISHED, variables_of
from result_files import existing, heading, write_result

SECONDS, RANKS = 60, 8


@dataclass(frozen=True)
class Case:
    """A script's model and the batch of one rank."""

    module: nn.Module
    rows: int
    length: int
    sizes: Any
    """The script's own settings."""

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())


class OnIds(nn.Module):
    """A model that is its own target and takes one input, which may have any format."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids.long()
        return self.inner(ids, ids)


def case_of(script: Path, environment: dict[str, str], device: str) -> Case:
    absent = {name: types.ModuleType(name) for name in ("sentencepiece", "zstandard", "flash_attn_interface")}
    attention: Any = absent["flash_attn_interface"]
    attention.flash_attn_func = lambda q, k, v, causal: nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    os.environ.update(environment)
    with patch.dict(sys.modules, absent):
        names = runpy.run_path(str(script), run_name="program")
    sizes = names["Hyperparameters"]()
    kind = names.get("GPT") or names["RecurrentGPT"]
    wanted = [name for name in inspect.signature(kind.__init__).parameters if hasattr(sizes, name)]
    with torch.device(device):
        module = OnIds(kind(**{name: getattr(sizes, name) for name in wanted}))
    return Case(module, sizes.train_batch_tokens // RANKS // sizes.train_seq_len, sizes.train_seq_len, sizes)


def mem_tracker(case: Case) -> float:
    """torch.distributed._tools.MemTracker over a second, uncompiled step on fake tensors, with AdamW."""
    import copy

    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        memo: dict[int, Any] = {id(each): torch.empty_like(each, device="cpu") for each in case.module.buffers()}
        for each in case.module.parameters():
            memo[id(each)] = nn.Parameter(torch.empty_like(each, device="cpu"))
        fake = copy.deepcopy(case.module, memo)
        ids = torch.zeros(case.rows, case.length, dtype=torch.int64)
        optimizer, tracker = torch.optim.AdamW(fake.parameters()), MemTracker()
        tracker.track_external(fake, optimizer, ids)
        with tracker:
            for number in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = fake(ids)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if number == 0:
                    tracker.reset_mod_stats()
    return max(each["Total"] for each in tracker.get_tracker_snapshot("peak").values())


def accelerate(case: Case) -> float:
    """`accelerate estimate-memory`: its arithmetic, on the module's own bytes; "batch size of 1" by its words."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    return max(estimate_training_usage(calculate_maximum_sizes(case.module)[0], "float32").values())


def torch_kitsune(case: Case) -> float:
    from kitsune.predict import predict_memory

    found = predict_memory(case.module, (case.length,), batch_size=case.rows, dtype="bfloat16", optimizer="adamw")
    parts = "param_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "overhead_bytes"
    return sum(getattr(found, part) for part in parts)


def alloc(case: Case) -> float:
    from alloc.ghost import ghost

    sizes = {"batch_size": case.rows, "seq_length": case.length, "hidden_dim": case.sizes.model_dim}
    return ghost(case.module, dtype="float32", optimizer_type="AdamW", **sizes).total_gb * 2**30


def vram_check(case: Case) -> float:
    from vram_check.estimator import estimate

    return estimate(case.parameters, case.rows, "bf16", "adamw", seq_len=case.length).total_bytes


def gpu_estimator(case: Case) -> float:
    from gpu_estimator import GPUEstimator

    found = GPUEstimator().estimate(
        case.parameters, batch_size=case.rows, precision="bf16", sequence_length=case.length
    )
    return found.total_memory_gb * 1e9


def blink_gpu(case: Case) -> float:
    from blink import BlinkPredictor

    found = BlinkPredictor().predict(case.module, batch_size=case.rows, input_shape=(case.length,))
    return found["memory_mb"] * 2**20


def fitcheck_llm(case: Case) -> float:
    from fitcheck.config_parser import ModelConfig
    from fitcheck.estimator import TrainingConfig, estimate
    from fitcheck.gpu_db import get_gpu

    sizes = case.sizes
    model = ModelConfig(
        name="model",
        num_params=case.parameters,
        hidden_size=sizes.model_dim,
        num_layers=getattr(sizes, "num_layers", None) or sizes.effective_depth,
        num_attention_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        intermediate_size=int(sizes.mlp_mult * sizes.model_dim),
        vocab_size=sizes.vocab_size,
        head_dim=sizes.model_dim // sizes.num_heads,
        tie_word_embeddings=sizes.tie_embeddings,
    )
    training = TrainingConfig(
        precision="bf16", batch_size=case.rows, seq_len=case.length, lora_rank=None, flash_attn=True
    )
    return estimate(model, training, get_gpu("h100")).total_mib * 2**20


def torchinfo(case: Case) -> float:
    """Its "estimated total size": inputs, outputs of a forward and a backward pass, parameters."""
    from torchinfo import summary

    device = next(case.module.parameters()).device
    ids = torch.zeros(case.rows, case.length, dtype=torch.int64, device=device)
    found = summary(case.module, input_data=ids, verbose=0, device=device)
    return found.total_input + found.total_output_bytes + found.total_param_bytes


PACKAGES: dict[str, Callable[[Case], float]] = {
    "MemTracker": mem_tracker,
    "accelerate": accelerate,
    "torch-kitsune": torch_kitsune,
    "alloc": alloc,
    "vram-check": vram_check,
    "gpu-estimator": gpu_estimator,
    "blink-gpu": blink_gpu,
    "fitcheck-llm": fitcheck_llm,
    "torchinfo": torchinfo,
}


def logs(only: str) -> dict[str, list[dict[str, str]]]:
    """The scripts with logs whose model can be built without running them."""
    found: dict[str, list[dict[str, str]]] = {}
    for row in csv.DictReader(PUBLISHED.open(encoding="utf-8")):
        if only in row["script"] and row["allocated_mib"] and row["script"].startswith("golf_"):
            found.setdefault(row["script"], []).append(row)
    return found


def estimate_here(name: str, script: Path, environment: dict[str, str]) -> dict[str, Any]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"it took more than {SECONDS} seconds of processor time")

    signal.signal(signal.SIGPROF, late)
    errors = []
    version = torch.__version__ if name == "MemTracker" else importlib.metadata.version(name)
    for device in ("meta", "cpu"):
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            found = float(PACKAGES[name](case_of(script, environment, device)))
            return {"bytes": found, "device": device, "version": version}
        except Exception as error:  # whatever a package raises is its result
            errors.append(f"{device}: {type(error).__name__}: {error}".splitlines()[0][:150])
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return {"error": "; ".join(errors), "version": version}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=existing, required=True)
    parser.add_argument("--answers", type=existing, required=True)
    parser.add_argument("--venvs", type=existing, required=True)
    parser.add_argument("--only", default="", help="scripts whose name has this in it")
    parser.add_argument("--minutes", type=float, default=20, help="of each estimator, for all scripts")
    parser.add_argument("--write", action="store_true", help="keep the table in results/")
    parser.add_argument("--estimate", help="estimate by this one, here, and print it as JSON")
    given = parser.parse_args()
    scripts = logs(given.only)
    if given.estimate:
        kept = dict(os.environ)
        for name, rows in scripts.items():
            os.environ.clear()
            os.environ.update(kept)
            found = estimate_here(given.estimate, given.programs / name, variables_of(rows[0]))
            print(json.dumps([name, found]), flush=True)
        return
    head = heading(
        "Estimators of training memory on scripts that people ran",
        "Peak MiB of one of eight ranks, and its error beside the allocated bytes that the logs state (the median of "
        "several). Where an estimator fails, its error is below.",
    )
    table: dict[str, dict[str, Any]] = {"napkin": {name: napkin_answer(given.answers, name) for name in scripts}}
    for name in PACKAGES:
        installed = given.venvs / name / "bin" / "python"
        python = installed if installed.exists() else Path(sys.executable)
        command = [str(python), "-W", "ignore", __file__, "--programs", str(given.programs), "--answers", "."]
        command += ["--venvs", ".", "--only", given.only, "--estimate", name]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60 * given.minutes)
            said, output = ran.stderr, ran.stdout
        except subprocess.TimeoutExpired as late:
            said, output = "it took too long", (late.stdout or b"").decode()
        lines = [json.loads(line) for line in output.splitlines() if line.startswith('["golf_')]
        table[name] = dict(lines) or {next(iter(scripts)): {"error": (said.strip().splitlines() or ["nothing"])[-1]}}
        print(f"{name}: done", file=sys.stderr, flush=True)
    found = lines_of(table, scripts)
    print("\n".join(found))
    if given.write:
        write_result("memory-estimators", [*head, *found])


def napkin_answer(answers: Path, script: str) -> dict[str, Any]:
    path = answers / script.replace(".py", ".json")
    if not path.exists():
        return {"error": "not rehearsed"}
    answer = json.loads(path.read_text())
    return {"error": answer["error"]} if "error" in answer else {"bytes": answer["highest_bytes"]}


def lines_of(table: dict[str, dict[str, Any]], scripts: dict[str, list[dict[str, str]]]) -> list[str]:
    stated = {name: statistics.median(float(row["allocated_mib"]) for row in rows) for name, rows in scripts.items()}
    short = [name.removesuffix(".py").split("_", 2)[-1][:24] for name in scripts]
    lines = [
        f"| | {' | '.join(short)} | median absolute error |",
        f"|---|{'---|' * (len(short) + 1)}",
        f"| its log | {' | '.join(f'{stated[name]:,.0f}' for name in scripts)} | |",
    ]
    for estimator, found in table.items():
        errors, cells = [], []
        for name in scripts:
            mib = found[name]["bytes"] / 2**20 if "bytes" in found.get(name, {}) else None
            if mib is None:
                cells.append("–")
                continue
            error = mib / stated[name] - 1
            cells.append(f"{mib:,.0f} ({error:+.1%})")
            errors.append(abs(error))
        version = next((each["version"] for each in found.values() if each.get("version")), "")
        median = f"{statistics.median(errors):.1%}" if errors else "–"
        lines.append(f"| {f'{estimator} {version}'.strip()} | {' | '.join(cells)} | {median} |")
    lines.append("")
    failures = {f"{estimator}: {each['error']}": None for estimator, found in table.items() for each in found.values()
                if "error" in each}  # fmt: skip
    return [*lines, *(f"- {each}" for each in failures)]


if __name__ == "__main__":
    main()
