"""What `napkin bench` does with the name of a collective."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from napkin.cli.common.progress import ProgressLine, progress_line
from napkin.cli.common.terminal import print_json, print_table, say
from napkin.errors import NapkinError
from napkin.units import format_bytes, format_seconds, format_share, format_three_digits

if TYPE_CHECKING:
    from napkin.benchmarking.collective_bench import AlphaBeta, CollectiveRow
    from napkin.benchmarking.conditions import Conditions
    from napkin.hardware.cluster import Operation


def bench_collective(
    name: str,
    shapes: Sequence[str],
    *,
    device: Literal["auto", "cpu", "cuda"],
    threads: int | None,
    seconds: float,
    sweep: bool,
    as_json: bool,
) -> None:
    """Time a collective by sizes and ranks, and print seconds, bandwidths and a fit.

    By itself it starts processes on this machine, which use gloo. Under torchrun all ranks time it, through NCCL where
    they have GPUs, and rank 0 prints.
    """
    from napkin.benchmarking.collective_bench import COLLECTIVES, DIMENSIONS, SWEEP, collective_shapes, fitted
    from napkin.benchmarking.conditions import Conditions
    from napkin.benchmarking.shapes import read_shapes
    from napkin.distributed.ranks import rank_info_of
    from napkin.recipe.precision import choose_device

    info = rank_info_of(os.environ)
    together = info.world_size > 1
    chosen = read_shapes(shapes, DIMENSIONS)
    if sweep and not chosen:
        # torchrun has decided on the number of ranks.
        chosen = [{"bytes": each["bytes"]} for each in SWEEP] if together else SWEEP
    sizes = collective_shapes(chosen, info.world_size if together else None)
    if not together and device == "cuda":
        raise NapkinError("--device cuda needs one process per GPU: start them with torchrun, or use --device cpu")
    device_type = choose_device(device) if together else "cpu"
    with progress_line(f"timing {name}", shown=info.rank == 0) as line:
        conditions = Conditions(device_type)
        if together:
            rows = _of_torchrun(COLLECTIVES[name], sizes, device_type, seconds, threads, line)
        else:
            rows = _of_processes(COLLECTIVES[name], sizes, seconds, threads, line)
    rows, fits = fitted(rows)
    if info.rank == 0:
        _print(name, rows, fits, conditions, as_json=as_json)


def _of_processes(
    operation: "Operation",
    sizes: Mapping[int, Sequence[int]],
    seconds: float,
    threads: int | None,
    line: ProgressLine,
) -> "list[CollectiveRow]":
    from napkin.benchmarking.collective_bench import time_in_processes
    from napkin.hardware.host import detect_host

    host = detect_host()
    most = max(sizes)
    return time_in_processes(
        operation,
        sizes,
        # As the ranks of a run on this machine have them.
        threads=threads or max(1, host.cores // most),
        seconds=seconds,
        free_bytes=host.available_bytes,
        progress=line,
    )


def _of_torchrun(
    operation: "Operation",
    sizes: Mapping[int, Sequence[int]],
    device_type: Literal["cpu", "cuda"],
    seconds: float,
    threads: int | None,
    line: ProgressLine,
) -> "list[CollectiveRow]":
    import torch

    from napkin.benchmarking.collective_bench import time_on_this_rank
    from napkin.distributed.joining import join_ranks
    from napkin.hardware.host import usable_cores
    from napkin.recipe.training_config import TrainingConfig

    with join_ranks(TrainingConfig(device=device_type)) as ranks:
        torch.set_num_threads(ranks.threads(threads, usable_cores()))
        return time_on_this_rank(
            operation, sizes, ranks.info.rank, seconds=seconds, device_type=device_type, progress=line
        )


def _print(
    name: str,
    rows: "Sequence[CollectiveRow]",
    fits: "dict[int, AlphaBeta]",
    conditions: "Conditions",
    *,
    as_json: bool,
) -> None:
    if as_json:
        from napkin.benchmarking.collective_bench import collective_values

        found = {str(ranks): vars(fit) for ranks, fit in fits.items()}
        values = [collective_values(row) for row in rows]
        print_json({"name": name, "conditions": conditions.values(), "rows": values, "fits": found})
        return
    from napkin.cli.measure.bench_output import print_conditions

    notes = any(row.refused for row in rows)
    headings = ["ranks", "bytes", "median", "±", "algorithm", "bus", "fit/median", *["not run"] * notes]
    print_table(headings, [[*_cells(row), *[row.refused] * notes] for row in rows], align="r" * 7 + "l" * notes)
    for ranks, fit in fits.items():
        say(
            f"{ranks} ranks: {format_seconds(fit.start_seconds)} + bytes that each sends / "
            f"{format_bytes(fit.bandwidth)}/s"
        )
    print_conditions(conditions)


def _cells(row: "CollectiveRow") -> list[str]:
    cells = [str(row.ranks), format_bytes(row.data_bytes)]
    if row.seconds is None or row.fitted_seconds is None:
        return [*cells, "", "", "", "", ""]
    median = row.seconds.median
    return [
        *cells,
        format_seconds(median),
        format_share(row.seconds.relative_width),
        format_bytes(row.data_bytes / median) + "/s",
        format_bytes(row.sent_bytes / median) + "/s",
        format_three_digits(row.fitted_seconds / median),
    ]
