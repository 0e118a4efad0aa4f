"""Time per output token and to the first one of napkin's engine on this machine, planned and then measured.

    python benchmarks/service_seconds.py [--quick] [--rounds 6]

Twelve shapes: four models, three loads. Each is planned as `napkin plan --serve` plans it, on a probe of the model's
shape, and then a load is sent to an engine with another model of that shape. Beside the plan stands the time to read
the weights once for each step, which people reckon with.
"""

import argparse
import statistics

import torch

from napkin.hardware.calibration_cache import calibration_of_this_machine
from napkin.hardware.sampling import ratio_interval
from napkin.inference import Engine
from napkin.inference.paged_cache import bytes_per_token
from napkin.inference.service_load import ServiceLoad, measure_load
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.planning import plan_service
from napkin.units import format_seconds
from result_files import heading, write_result
from turns import BRACKETS, spread, told

MODELS = {
    "30 M": ModelConfig(16384, 1024, d_model=384, n_layers=8, n_heads=6),
    "GPT-2-small's size": ModelConfig(50257, 1024, d_model=768, n_layers=12, n_heads=12),
    "grouped queries, 4 of 16": ModelConfig(32000, 1024, d_model=1024, n_layers=8, n_heads=16, n_kv_heads=4),
    "sliding window of 128": ModelConfig(16384, 1024, d_model=512, n_layers=8, n_heads=8, attention_window=128),
}
LOADS = (
    ServiceLoad(3, 64, 32, concurrency=1),
    ServiceLoad(8, 256, 32, concurrency=4),
    ServiceLoad(24, 96, 24, concurrency=12),
)


def main() -> None:
    """Print and keep a table of planned and measured times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one model")
    parser.add_argument("--rounds", type=int, default=6, help="times that each load is sent")
    options = parser.parse_args()
    lines = heading("Seconds of a service, planned and measured", BRACKETS)
    lines += ["| model | load | token | planned | over it | weights over it | first token | planned | over it |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    print("\n".join(lines[-2:]), flush=True)
    errors: dict[str, list[float]] = {"token": [], "weights": [], "first": [], "bytes": []}
    for name, config in list(MODELS.items())[: 1 if options.quick else None]:
        for load in LOADS:
            row, off = compare(name, config, load, options.rounds)
            for kind, ratio in off.items():
                errors[kind].append(abs(ratio - 1))
            lines.append(row)
            print(row, flush=True)
    middle = {kind: f"{statistics.median(found):.1%}" for kind, found in errors.items()}
    lines += [
        "",
        f"median error: time per token {middle['token']}, weights once per step {middle['weights']}, time to first "
        f"token {middle['first']}, bytes {middle['bytes']} (worst {max(errors['bytes']):.1%})",
    ]
    print("\n".join(lines[-2:]))
    write_result("service-seconds", lines)


def compare(name: str, config: ModelConfig, load: ServiceLoad, rounds: int) -> tuple[str, dict[str, float]]:
    """A row of the table, and planned over measured: seconds per token, those of reading the weights, seconds to the
    first token, bytes."""
    size = load.input_tokens + load.output_tokens + 16
    cache_bytes = (load.concurrency or 1) * size * bytes_per_token(config, torch.bfloat16)
    plan = plan_service(
        config,
        concurrency=load.concurrency,
        input_tokens=load.input_tokens,
        output_tokens=load.output_tokens,
        requests=load.requests,
        cache_bytes=cache_bytes,
    )
    (here,) = plan.degrees
    assert here.simulation is not None
    model = Transformer(config, seed=1, dtype=torch.bfloat16)
    engine = Engine(model, cache_bytes=cache_bytes)
    measure_load(engine, ServiceLoad(1, 8, 2, concurrency=1))
    measured = [measure_load(engine, load) for _ in range(rounds)]
    tokens = [each.per_token(50) for each in measured]
    firsts = [each.first_token(50) for each in measured]
    token, first = here.simulation.per_token(50), here.simulation.first_token(50)
    read = plan.weight_bytes / calibration_of_this_machine("cpu").memory_bandwidth
    over = {
        kind: ratio_interval([planned] * rounds, taken)
        for kind, planned, taken in (("token", token, tokens), ("weights", read, tokens), ("first", first, firsts))
    }
    held = engine.cache.nbytes + sum(parameter.nbytes for parameter in model.parameters())
    cells = [
        name,
        f"{load.concurrency} × {load.input_tokens}+{load.output_tokens}",
        spread(tokens, format_seconds),
        format_seconds(token),
        told(over["token"]),
        told(over["weights"]),
        spread(firsts, format_seconds),
        format_seconds(first),
        told(over["first"]),
    ]
    off = {kind: ratio.median for kind, ratio in over.items()}
    return f"| {' | '.join(cells)} |", {**off, "bytes": (here.kv_pool_bytes + plan.weight_bytes) / held}


if __name__ == "__main__":
    main()
