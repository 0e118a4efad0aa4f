"""How far the gradient of one batch moves when it is computed differently: micro-batches, packing, order, side, ranks.

Each figure is the norm of the difference from the gradient of single sequences, one micro-batch each, in parts of its
norm, in fp32; ranks are processes of this machine with gloo. The objectives, with their batches and a tiny model, are
those of tests/oracles/alignment_cases.py.

    python benchmarks/alignment_invariance.py           # some twenty seconds

The table is also written to benchmarks/results/. It exits with 1 where a figure is above 1e-6.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from result_files import heading, no_options, write_result

TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from oracles.alignment_cases import CASES, WITH_SCALAR_HEAD, gradient_of, train_state_of  # noqa: E402  # pyright: ignore[reportMissingImports]
from reliability.ranks import free_port  # noqa: E402  # pyright: ignore[reportMissingImports]

LIMIT = 1e-6
ALONE: dict[str, dict[str, Any]] = {
    "micro-batches of 64 tokens": {"max_tokens": 64, "packing": "padded"},
    "one micro-batch": {"max_tokens": 10**6, "packing": "padded"},
    "packed": {"max_tokens": 10**6, "packing": "packed"},
    "padded left": {"max_tokens": 10**6, "packing": "padded left"},
}
RANKS = tuple((size, strategy) for size in (2, 4) for strategy in ("ddp", "fsdp"))


def main() -> None:
    """Compute, print and keep the table."""
    no_options(__doc__)
    head = heading("One gradient, whichever way, in fp32")
    torch.set_num_threads(1)
    on_ranks = {size: gradients_on_ranks(size) for size in (2, 4)}
    names = [*ALONE, "reversed order", *(f"{size} ranks, {strategy}" for size, strategy in RANKS)]
    lines = [
        f"| objective | {' | '.join(names)} |",
        "|---" * (len(names) + 1) + "|",
    ]
    largest = 0.0
    for name, make in CASES.items():
        objective, examples = make()
        train_state = train_state_of(scalar_head=name in WITH_SCALAR_HEAD)
        expected, _ = gradient_of(train_state, examples, objective, max_tokens=1, packing="padded")
        found = [gradient_of(train_state, examples, objective, **how)[0] for how in ALONE.values()]
        found.append(gradient_of(train_state, examples[::-1], objective, max_tokens=64)[0])
        found += [on_ranks[size][f"{name}, {strategy}, 64"] for size, strategy in RANKS]
        distances = [float((each - expected).norm() / expected.norm()) for each in found]
        largest = max(largest, *distances)
        lines.append(f"| {name} | {' | '.join(f'{each:.0e}' for each in distances)} |")
    lines += ["", f"the largest is {largest:.1e}, the limit {LIMIT:.0e}"]
    print("\n".join(lines))
    write_result("alignment-invariance", [*head, *lines])
    if not largest <= LIMIT:
        raise SystemExit(1)


def gradients_on_ranks(size: int) -> dict[str, Tensor]:
    """By case, strategy and size of micro-batches, the gradient that several ranks have."""
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryDirectory() as folder:
        script = TESTS / "tuning" / "rank_gradients.py"
        command = [sys.executable, script, folder, str(size), str(free_port())]
        subprocess.run(command, env={**os.environ, **environment}, check=True)
        return load_file(Path(folder) / "gradients.safetensors")


if __name__ == "__main__":
    main()
