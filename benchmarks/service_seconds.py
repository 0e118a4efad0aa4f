"""Time per output token and to the first one of napkin's engine on this machine, planned and then measured.

    python benchmarks/service_seconds.py [--quick]

Twelve shapes: four models, three loads. Each is planned as `napkin plan --serve` plans it, on a probe of the model's
shape, and then a load is sent to an engine with another model of that shape. Beside the plan stands the time to read
the weights once for each step, which people reckon with.
"""

import argparse
import platform
import statistics
from datetime import UTC, datetime

import torch

from napkin.hardware.calibration_cache import calibration_of_this_machine
from napkin.inference import Engine
from napkin.inference.paged_cache import bytes_per_token
from napkin.inference.service_load import ServiceLoad, measure_load
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.planning import plan_service
from result_files import write_result

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


def main(*, quick: bool) -> None:
    """Print a table of planned and measured times."""
    bandwidth = calibration_of_this_machine("cpu").memory_bandwidth
    threads = torch.get_num_threads()
    lines = [
        f"{platform.machine()}, {threads} threads, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"{'model':26} {'load':>12} {'token':>9} {'planned':>9} {'ratio':>6} {'weights':>8} {'first':>9} {'ratio':>6}",
    ]
    errors: dict[str, list[float]] = {"token": [], "weights": [], "first": [], "bytes": []}
    for name, config in list(MODELS.items())[: 1 if quick else None]:
        for load in LOADS:
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
            measured = measure_load(engine, load)
            token, first = (
                planned / real
                for planned, real in (
                    (here.simulation.per_token(50), measured.per_token(50)),
                    (here.simulation.first_token(50), measured.first_token(50)),
                )
            )
            read = plan.weight_bytes / bandwidth / measured.per_token(50)
            held = engine.cache.nbytes + sum(parameter.nbytes for parameter in model.parameters())
            errors["bytes"].append(abs((here.kv_pool_bytes + plan.weight_bytes) / held - 1))
            for kind, ratio in (("token", token), ("weights", read), ("first", first)):
                errors[kind].append(abs(ratio - 1))
            asked = f"{load.concurrency} × {load.input_tokens}+{load.output_tokens}"
            lines.append(
                f"{name:26} {asked:>12} {measured.per_token(50) * 1e3:6.2f} ms "
                f"{here.simulation.per_token(50) * 1e3:6.2f} ms {token:6.2f} {read:8.2f} "
                f"{measured.first_token(50) * 1e3:6.0f} ms {first:6.2f}"
            )
            print(lines[-1], flush=True)
    middle = {kind: f"{statistics.median(found):.1%}" for kind, found in errors.items()}
    lines.append(
        f"median error: time per token {middle['token']}, weights once per step {middle['weights']}, time to first "
        f"token {middle['first']}, bytes {middle['bytes']} (worst {max(errors['bytes']):.1%})"
    )
    print("\n" + "\n".join(lines))
    write_result("service-seconds", lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one model")
    main(quick=parser.parse_args().quick)
