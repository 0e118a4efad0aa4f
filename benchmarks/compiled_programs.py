"""Compiled training programs of other people, counted without a GPU beside what their logs say that they took.

    python benchmarks/compiled_programs.py --programs FOLDER --logs golf_programs.csv [--only NAME]

`FOLDER` holds programs of openai/parameter-golf (https://github.com/openai/parameter-golf, records/*/train_gpt.py),
which are not part of this project, and the csv what their logs say. Each program's own classes and its own `main`, up
to its first batch, build model and optimizers, on fake tensors and as rank 0 of a fake process group. Its step
(forward, backward, update, under DistributedDataParallel and torch.compile) is then counted for an H100. A program runs
in a child process, one after the other.
"""

import argparse
import ast
import csv
import io
import json
import os
import subprocess
import sys
import types
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

ENVIRONMENT = {
    "10L_MixedPrecision": {"NUM_LAYERS": "10"},
    "11L_XSA4": {"NUM_LAYERS": "11", "BIGRAM_VOCAB_SIZE": "2048"},
}
"""What a log says that its program was started with, beside its defaults."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--program", type=Path, help="count this one and print it as JSON")
    arguments = parser.parse_args()
    if arguments.program:
        print(json.dumps(count_program(arguments.program)))
        return
    logs: dict[str, list[dict[str, str]]] = {}
    for row in csv.DictReader(arguments.logs.open()):
        logs.setdefault(row["file"].split("/")[1], []).append(row)
    errors, reserved_errors = [], []
    head = f"{'program':<60} {'logs':>4} {'allocated MiB: log':>18} {'counted':>8} {'error':>7}"
    print(f"{head} {'reserved':>9} {'counted':>8}")
    for name, rows in logs.items():
        file = arguments.programs / f"golf_{name}.py"
        if arguments.only not in name or not file.exists():
            continue
        first = rows[0]
        environment = {"TRAIN_BATCH_TOKENS": first["batch_tokens"], "TRAIN_SEQ_LEN": first["seq"]}
        for part, extra in ENVIRONMENT.items():
            environment |= extra if part in name else {}
        command = [sys.executable, "-W", "ignore", __file__, "--program", str(file), "--programs", ".", "--logs", "."]
        ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
        if ran.returncode:
            print(f"{name:<60} {ran.stderr.strip().splitlines()[-1][:150]}")
            continue
        counted = json.loads(ran.stdout.splitlines()[-1])
        log, log_reserved = (
            median(float(row[key]) for row in rows) for key in ("peak_allocated_mib", "peak_reserved_mib")
        )
        errors += [counted["peak_mib"] / float(row["peak_allocated_mib"]) - 1 for row in rows]
        reserved_errors += [counted["reserved_mib"] / float(row["peak_reserved_mib"]) - 1 for row in rows]
        assert counted["parameters"] == int(first["params"]), (counted["parameters"], first["params"])
        peak, reserved = counted["peak_mib"], counted["reserved_mib"]
        line = f"{name:<60} {len(rows):>4} {log:>18,.0f} {peak:>8,.0f} {peak / log - 1:>+7.1%} {log_reserved:>9,.0f}"
        print(f"{line} {reserved:>8,.0f}  {counted['seconds']:.0f} s", flush=True)
    for what, found in (("allocated", errors), ("reserved", reserved_errors)):
        if found:
            sizes = sorted(map(abs, found))
            ninth = sizes[-(-9 * len(sizes) // 10) - 1]
            print(f"{what}, {len(sizes)} logs: median error {median(sizes):.1%}, nine in ten within {ninth:.1%}")


def count_program(file: Path) -> dict[str, Any]:
    """The figures of one program's step, as rank 0 of 8, on an H100 with the torch of its time."""
    import time

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    import napkin
    from napkin.distributed.fake_ranks import fake_ranks
    from napkin.hardware.target import CudaTarget

    begin = time.process_time()
    with FakeTensorMode(allow_non_fake_inputs=True), fake_ranks(8, 0):
        names = run_main(file)
        arguments, model, optimizers = names["args"], names["model"], names["optimizers"]
        tokens = arguments.train_batch_tokens // 8
        batch = torch.zeros(2, tokens // arguments.train_seq_len, arguments.train_seq_len, dtype=torch.int64)
        x, y = batch[0].clone(), batch[1].clone()
        del batch
        averages = None
        if getattr(arguments, "ema_enabled", False):
            averages = {name: each.detach().float().clone() for name, each in names["base_model"].state_dict().items()}

        def step(model: Any, batch: Any) -> None:
            with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
                loss = model(*batch)
            loss.backward()
            if arguments.grad_clip_norm > 0:
                torch.nn.utils.clip_grad_norm_(names["base_model"].parameters(), arguments.grad_clip_norm)
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            if averages is not None:
                for name, each in names["base_model"].state_dict().items():
                    averages[name].mul_(0.99).add_(each.detach().float(), alpha=0.01)

        target = CudaTarget(rms_norm_in_fp32=False)
        ledger = napkin.count(model, (x, y), step, target=target, warm_up=2)
    assert ledger.reserved_bytes is not None
    print(ledger, file=sys.stderr)
    if os.environ.get("NAPKIN_ROWS"):
        for row in ledger.rows:
            print(row.phase, row.module, row.operator, row.bytes_allocated, row.bytes_kept, file=sys.stderr)
    return {
        "parameters": ledger.parameters,
        "peak_mib": ledger.peak_bytes / 2**20,
        "reserved_mib": ledger.reserved_bytes / 2**20,
        "by_category": ledger.peak_by_category,
        "seconds": time.process_time() - begin,
    }


def run_main(file: Path) -> dict[str, Any]:
    """What a program's `main` has made before its first batch, with stand-ins for a GPU and its data."""
    import torch
    from torch import Tensor, nn
    from torch.overrides import TorchFunctionMode

    def on_cpu(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("cpu")
        return "cpu" if isinstance(value, str) and value.startswith("cuda") else value

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            if function is Tensor.cuda:
                return args[0]
            if function is torch.device:
                return on_cpu(torch.device(*args))
            kwargs = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
            return function(*map(on_cpu, args), **kwargs)

    def apply(self: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
        # torch refuses to swap the contents of fake parameters.
        for child in self.children():
            child._apply(change)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                self._parameters[name] = nn.Parameter(change(parameter.detach()), parameter.requires_grad)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = change(buffer)
        return self

    def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        # FlashAttention 3 allocates as the operator of torch does.
        q, k, v = (each.transpose(1, 2) for each in (query, key, value))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return mixed.transpose(1, 2)

    tree = ast.parse(file.read_text())
    tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
    entry = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    until = next(
        at for at, node in enumerate(entry.body) if "Loader(" in ast.unparse(node) and isinstance(node, ast.Assign)
    )
    entry.body = [*entry.body[:until], ast.parse("return dict(locals())").body[0]]
    program: Any = types.ModuleType("program")
    program.__file__ = str(file)
    attention = types.ModuleType("flash_attn_interface")
    attention.flash_attn_func = attend  # pyright: ignore[reportAttributeAccessIssue]
    stand_ins = {"program": program, "flash_attn_interface": attention}
    stand_ins |= {name: types.ModuleType(name) for name in ("sentencepiece", "zstandard")}
    with ExitStack() as stack:
        sys.modules.update(stand_ins)
        stack.enter_context(patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}))
        exec(compile(tree, str(file), "exec"), program.__dict__)
        program.spm = types.SimpleNamespace(
            SentencePieceProcessor=lambda **_: types.SimpleNamespace(vocab_size=lambda: 1024)
        )
        program.load_validation_tokens = lambda *_: torch.zeros(2, dtype=torch.int64)
        program.build_sentencepiece_luts = lambda sp, size, device: tuple(
            torch.zeros(size, dtype=each) for each in (torch.int16, torch.bool, torch.bool)
        )
        program.open = lambda *_, **__: io.StringIO()
        program.subprocess = types.SimpleNamespace(run=lambda *_, **__: types.SimpleNamespace(stdout=""), PIPE=-1)
        program.DDP = lambda module, **_: torch.nn.parallel.DistributedDataParallel(module, broadcast_buffers=False)
        for owner, name, value in (
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "set_device", lambda *_: None),
            (torch.cuda, "manual_seed_all", lambda *_: None),
            (torch.distributed, "init_process_group", lambda *_, **__: None),
            (torch.distributed, "barrier", lambda *_, **__: None),
            (nn.Module, "_apply", apply),
            (os, "makedirs", lambda *_, **__: None),
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(OnCpu())
        return program.main()


if __name__ == "__main__":
    main()
