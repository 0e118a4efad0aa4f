import json
import math
from pathlib import Path

import pytest

# A trained run and the commands that act on it.
from cli.conftest import cache as cache
from cli.conftest import napkin as napkin
from cli.conftest import place as place
from cli.conftest import trained as trained


@pytest.fixture
def plan() -> dict:
    table = [
        {"quantity": "parameters", "unit": "count", "rule": 800_000, "count": 812_544, "note": "biases & norms"},
        {"quantity": "peak memory", "unit": "bytes", "rule": 13_000_704, "count": 403_000_000, "note": "activations"},
        {"quantity": "seconds per step", "unit": "seconds", "rule": None, "count": 0.52, "note": ""},
    ]
    return {
        "napkin": "0.1.0",
        "created": "2026-11-20T10:00:00+00:00",
        "device": {
            "name": "EPYC <16 cores>",
            "kind": "cpu",
            "matmul_peak": 1.2e12,
            "format": "fp32",
            "memory_bytes": 8_000_000_000,
        },
        "steps": 300,
        "tokens_per_step": 4096,
        "fits": True,
        "seconds": 156.0,
        "peak_by_category": {
            "parameters": 3_250_176,
            "gradients": 3_250_176,
            "optimizer state": 6_500_352,
            "activations": 380_000_000,
            "inputs": 65_536,
            "temporaries": 9_933_760,
        },
        "flops_by_phase": {"forward": 7.1e9, "backward": 1.31e10, "optimizer": 0},
        "seconds_by_operator": {"mm": 0.21, "add": 0.2, "_softmax": 0.11},
        "table": table,
    }


def metrics_line(step: int, **changes: float | None) -> str:
    line = {
        "step": step,
        "tokens": 4096 * step,
        "loss": 2 + 6 * math.exp(-step / 60) + 0.1 * math.sin(step * 1.7),
        "learning_rate": 0.003,
        "gradient_norm": 0.7,
        "seconds": 0.6 * step,
        "step_seconds": 0.6,
        "tokens_per_second": 6800.0 + step % 7,
        "mfu": (6800.0 + step % 7) / 16000,
        "bytes": 403_000_000,
    }
    return json.dumps({**line, **changes})


def metrics_text(steps: int) -> str:
    lines = [
        metrics_line(step, **({"validation_loss": 2.2 + 6 * math.exp(-step / 60)} if step % 50 == 0 else {}))
        for step in range(1, steps + 1)
    ]
    return "\n".join(lines) + "\n"


@pytest.fixture
def planned_run(tmp_path: Path, plan: dict) -> Path:
    run = tmp_path / "shakespeare"
    run.mkdir()
    (run / "recipe.toml").write_text('name = "shakespeare"\n\n[model]\nd_model = 128  # <small & quick>\n')
    (run / "plan.json").write_text(json.dumps(plan))
    return run


@pytest.fixture
def running_run(planned_run: Path) -> Path:
    (planned_run / "metrics.jsonl").write_text(metrics_text(120))
    return planned_run


@pytest.fixture
def full_run(planned_run: Path, plan: dict) -> Path:
    meters = [812_544, 411_000_000, 0.61]
    table = [{**row, "meter": meter} for row, meter in zip(plan["table"], meters, strict=True)]
    seconds = {"data": 1.5, "forward": 60.0, "backward": 110.5, "optimizer": 9.0, "checkpoints": 0.5, "other": 2.5}
    measurement = {"table": table, "seconds": seconds, "mfu": 0.4123, "hfu": 0.4321, "steps": 300}
    evaluation = {
        "loss": 2.2404,
        "perplexity": 9.3971,
        "bits_per_byte": 1.714,
        "tokens": 12_000,
        "bytes": 22_500,
        "gzip_bits_per_byte": 3.381,
        "xz_bits_per_byte": 3.107,
        "step": 300,
    }
    (planned_run / "metrics.jsonl").write_text(metrics_text(300))
    (planned_run / "measurement.json").write_text(json.dumps(measurement))
    (planned_run / "evaluation.json").write_text(json.dumps(evaluation))
    (planned_run / "samples.txt").write_text('\n  <script>alert("to be")</script> & </pre> <b>not</b> {{ 7 * 7 }}\n')
    return planned_run
