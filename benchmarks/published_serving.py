"""Time to first token and per output token of published measurements of servers: planned beside measured.

    python benchmarks/published_serving.py          judge: constants found on one system predict the other
    python benchmarks/published_serving.py --fit    also fit to all rows, and write hardware/service_efficiency.toml

published_serving.csv has 442 points of Llama 3.1 8B and 70B on H200 and B200, of TensorRT-LLM, vLLM and SGLang, with
tensor ranks of 1 to 8: the sample of measurements in tools/accuracy_regression_testing of
https://github.com/ai-dynamo/aiconfigurator (Apache-2.0), unchanged. How they were measured is not in the file. Those of
the 70B model have the shapes, concurrencies and ranks of InferenceMAX, whose scripts are public
(https://github.com/SemiAnalysisAI/InferenceX, benchmarks/70b_*.sh), and are read as measured by them: 10 requests per
client; lengths evenly between 0.8 and 1 of those stated; the cache in fp8; in vLLM at most 8192 tokens per step and 0.9
of the memory; in TensorRT-LLM as many tokens per step as a sequence has, 0.9 of what the weights leave, no preemption,
and with 1024 + 1024 tokens and fewer than 8 ranks prompts that wait for others up to 20 steps, or until a step has 0.9
of its tokens. How SGLang was measured is not known: its
cache is taken to be in bf16, and its lengths between 0.95 and 1 of those stated, which its rows on 1 and 2 ranks say
best (of equal lengths, requests would be in lockstep, and the first token twice as late as measured).

Rows are split by system and by server. "Found on one system": the constants of each server are fitted to its rows on
that system alone, drawn towards what is known beforehand (`PRIOR`); intervals are those stated for a device that was
not measured. "By constants of the others": the geometric means of those of the other servers, with this one's schedule.
SGLang's rows are all of H200. Compared with: the roofline at the datasheet's peaks, and the constants of `PRIOR`, which
no row was fitted to. The form of the model was chosen with all rows in sight: that all-reduces take the share of the
link that training runs reach on each generation, and that memory and products do not, is such a choice.
"""

import argparse
import csv
import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from napkin.hardware.device import Device
from napkin.hardware.device_file import find_device
from napkin.hardware.service_efficiency import FITTED, Schedule, ServiceEfficiency, service_efficiencies
from napkin.model.config import preset
from napkin.planning.services.device_service import interval_of
from napkin.planning.services.replica import (
    Replica,
    ServiceWork,
    WeightFormat,
    count_work,
    timeline_of,
)
from napkin.planning.services.server_schedule import Load, Timeline
from result_files import heading, write_result

FOLDER = Path(__file__).parent
TABLE = FOLDER.parent / "src" / "napkin" / "hardware" / "service_efficiency.toml"
PRIOR = {
    # The expected value, and the standard deviation of its logarithm.
    "weight_share": (0.8, 0.2),  # large copies reach 0.9 of a datasheet's bandwidth
    "kv_share": (0.7, 0.4),
    "product_share": (0.65, 0.3),  # training runs reach 0.47 to 0.72 of bf16 peaks: hardware/efficiency.toml
    "attention_share": (0.45, 0.4),  # the same table has 0.26 to 0.66
    "activation_share": (0.37, 0.7),  # its fused_share
    "layer_seconds": (20e-6, 0.7),  # a captured graph launches a kernel in 1 to 2 microseconds; a layer has about ten
    "step_seconds": (1e-3, 1.0),
    "sequence_seconds": (10e-6, 1.5),
    "request_seconds": (0.03, 0.5),  # tokenizing, HTTP and the client: some tens of milliseconds
    "collective_seconds": (8e-6, 0.7),  # NCCL starts in 8.4: napkin.hardware.cluster
    "direct_share": (0.7, 0.4),
    "ring_share": (1.0, 0.4),
}
TPOT_NOISE, TTFT_NOISE = 0.05, 0.24
"""Relative errors from which an error counts less than by its square."""
SETTINGS: dict[str, dict[str, Any]] = {
    # vLLM 0.11 on devices of more than 70 GiB: max_num_batched_tokens and max_num_seqs of its API server.
    "vllm": {
        "schedule": Schedule(False, True, 8192, 1024, 0.0),
        "memory_share": 0.9,
        "memory_share_is_of_rest": False,
    },
    # TensorRT-LLM's defaults: no chunked context, max_num_tokens, max_batch_size, GUARANTEED_NO_EVICT.
    "trtllm": {
        "schedule": Schedule(False, False, 8192, 2048, 1.0),
        "memory_share": 0.9,
        "memory_share_is_of_rest": True,
    },
    # SGLang: chunked_prefill_size on devices below 160 GB; its new_token_ratio falls from 0.7 to 0.098.
    "sglang": {
        "schedule": Schedule(True, True, 8192, 2048, 0.1),
        "memory_share": 0.85,
        "memory_share_is_of_rest": False,
    },
}


@functools.cache
def work_of(model: str) -> ServiceWork:
    return count_work(preset("llama-3-8b" if "8B" in model else "llama-3-70b"))


@dataclass(frozen=True)
class Measurement:
    """One row of the table."""

    row: tuple[tuple[str, str], ...]

    def __getitem__(self, name: str) -> str:
        return dict(self.row)[name]

    @functools.cached_property
    def device(self) -> Device:
        return find_device(self["system"].split("_")[0])

    @functools.cached_property
    def load(self) -> Load:
        inputs, outputs, tensor = (int(self[name]) for name in ("input_tokens", "output_tokens", "tensor_parallel"))
        known, trtllm = "70B" in self["model"], self["backend"] == "trtllm"
        return Load(
            concurrency=int(self["concurrency"]),
            input_tokens=inputs,
            output_tokens=outputs,
            requests_per_client=10,
            shortest=0.8 if known else 0.95,
            # The longest sequence, and a margin.
            max_batched_tokens=inputs + outputs + (20 if inputs == outputs else 200) if trtllm else None,
            batch_wait_steps=20 if trtllm and inputs == outputs and tensor < 8 else 0,
            batch_wait_share=0.9,
        )

    @functools.cached_property
    def timeline(self) -> Timeline:
        """The steps of the server: of a closed load they do not depend on the constants that are fitted."""
        return timeline_of(self.replica(expected(self["backend"])), self.load)

    def replica(self, server: ServiceEfficiency) -> Replica:
        return Replica(
            work_of(self["model"]),
            self.device,
            server,
            int(self["tensor_parallel"]),
            cast(WeightFormat, self["weights"]),
            "bf16" if self["backend"] == "sglang" else "fp8",
        )

    @functools.cached_property
    def steps(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The arguments of `Replica.step_seconds` [4, step], and what each step's seconds add to both means [2, step].

        Steps with as many sequences and within 3% as many tokens of prompts are one: at a given number of tokens, the
        seconds are linear in all else.
        """
        line = self.timeline
        arguments = np.stack([line.sequences, line.context, line.prompt_tokens, line.pairs])
        first, token = line.shares(self.load.weights(line.wave))
        groups = np.stack([line.sequences, np.round(np.log1p(line.prompt_tokens) / 0.03)])
        columns: list[NDArray[np.float64]] = []
        shares: list[NDArray[np.float64]] = []
        for at, share in enumerate((token, first)):
            _, group = np.unique(groups[:, share > 0], axis=1, return_inverse=True)
            total = np.bincount(group, share[share > 0]).astype(np.float64)
            columns.append(
                np.stack([np.bincount(group, share[share > 0] * row[share > 0]) / total for row in arguments])
            )
            shares.append(np.stack([total * (at == 0), total * (at == 1)]))
        return np.concatenate(columns, 1), np.concatenate(shares, 1)

    def planned(self, server: ServiceEfficiency) -> NDArray[np.float64]:
        """Mean time per output token and to first token, as `times_of` has them."""
        server = server.on(self.device)
        arguments, shares = self.steps
        return shares @ self.replica(server).step_seconds(*arguments) + (0.0, server.request_seconds)

    @functools.cached_property
    def measured(self) -> NDArray[np.float64]:
        """Time per output token and to first token, in seconds."""
        return np.array([float(self["tpot_ms"]), float(self["ttft_ms"])]) / 1e3


def read_measurements() -> list[Measurement]:
    """All rows of published_serving.csv."""
    with (FOLDER / "published_serving.csv").open(newline="", encoding="utf-8") as file:
        return [Measurement(tuple(row.items())) for row in csv.DictReader(file)]


def expected(server: str) -> ServiceEfficiency:
    """The constants before anything was fitted."""
    values = {name: value for name, (value, _) in PRIOR.items()}
    return ServiceEfficiency(**values, **SETTINGS[server], tpot_factor=1.0, ttft_factor=1.0)


def log_errors(server: ServiceEfficiency, rows: Sequence[Measurement]) -> NDArray[np.float64]:
    """[row, 2]: logarithms of planned over measured, of the time per output token and to first token."""
    planned = np.array([row.planned(server) for row in rows])
    return np.log(planned / np.array([row.measured for row in rows]))


BETWEEN_GENERATIONS = 0.5
"""Width of the constants of a generation around those of all, as a share of that of `PRIOR`."""
BACKLOG_CLIENTS = 448
"""From so many clients on, SGLang's rows wait up to 8 s for their first token, the longer the more tokens an answer
has: something that streams tokens is overrun, which the model does not have. No constant is fitted to those rows, and
intervals are not made to hold them."""


def fitted(server: str, rows: Sequence[Measurement]) -> ServiceEfficiency:
    """The constants of a server for all devices and for those of each generation."""
    used = [row for row in rows if is_fitted_to(row)]
    of_all = fit(used, expected(server), 1.0)
    names = sorted({generation(row) for row in used})
    found: dict[str, dict[str, float]] = {}
    if len(names) > 1:
        for name in names:
            own = fit([row for row in used if generation(row) == name], of_all, BETWEEN_GENERATIONS)
            found[name] = {constant: float(f"{getattr(own, constant):.4g}") for constant in FITTED}
    return with_residuals(dataclasses.replace(of_all, generations=found), used)


def is_fitted_to(row: Measurement) -> bool:
    return row["backend"] != "sglang" or int(row["concurrency"]) < BACKLOG_CLIENTS


def generation(row: Measurement) -> str:
    return ".".join(map(str, cast(tuple[int, int], row.device.compute_capability)))


def fit(
    rows: Sequence[Measurement], start: ServiceEfficiency, width_share: float, rounds: int = 25
) -> ServiceEfficiency:
    """Constants near those at the start, from rows: damped least squares (Marquardt 1963) on logarithms, in which large
    errors count less than by their square."""
    centre = np.log([getattr(start, name) for name in FITTED])
    width = width_share * np.array([PRIOR[name][1] for name in FITTED])

    def made(logs: NDArray[Any]) -> ServiceEfficiency:
        return dataclasses.replace(start, **dict(zip(FITTED, map(float, np.exp(logs)), strict=True)))

    def residuals(logs: NDArray[Any]) -> NDArray[np.float64]:
        errors = (log_errors(made(logs), rows) / (TPOT_NOISE, TTFT_NOISE)).ravel()
        softened = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
        return np.concatenate([softened, (logs - centre) / width])

    logs: NDArray[np.float64] = centre.copy()
    damping: float = 1e-2
    now: NDArray[np.float64] = residuals(logs)
    for _ in range(rounds):
        slopes: NDArray[np.float64] = np.stack(
            [(residuals(logs + 1e-3 * unit) - now) / 1e-3 for unit in np.eye(len(logs))], axis=1
        )
        normal = slopes.T @ slopes
        while damping < 1e6:
            step: NDArray[Any] = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slopes.T @ now)
            then = residuals(logs + step)
            if then @ then < now @ now:
                break
            damping *= 4
        else:
            break
        gained = now @ now - then @ then
        logs, now, damping = logs + step, then, damping / 4
        if gained < 1e-4 * (now @ now):
            break
    return made(logs)


def with_residuals(server: ServiceEfficiency, rows: Sequence[Measurement]) -> ServiceEfficiency:
    """The constants with what they say of the rows that they were fitted to."""
    errors = log_errors(server, rows)
    factors = np.exp(np.quantile(np.abs(errors), 0.9, axis=0))
    medians = np.median(np.abs(np.expm1(errors)), axis=0)
    return dataclasses.replace(
        server,
        tpot_factor=float(factors[0]),
        ttft_factor=float(factors[1]),
        tpot_residual=float(medians[0]),
        ttft_residual=float(medians[1]),
        rows=len(rows),
        devices=tuple(sorted({row.device.name for row in rows})),
        formats=tuple(sorted({row["weights"] for row in rows})),
    )


def roofline(row: Measurement) -> NDArray[np.float64]:
    """Both times at the datasheet's peaks: bytes over the bandwidth, FLOPs over the peak, nothing else."""
    replica, load = row.replica(expected(row["backend"])), row.load
    assert load.concurrency is not None
    bandwidth = row.device.memory_bandwidth
    context = load.input_tokens + load.output_tokens / 2
    flops = replica.work.decode_flops(load.concurrency, context) / replica.tensor / replica.product_peak
    decode = max(replica.step_bytes(load.concurrency, context) / bandwidth, flops)
    return np.array([decode, replica.work.prefill_flops(load.input_tokens) / replica.tensor / replica.product_peak])


def described(errors: NDArray[np.float64], covered: NDArray[np.bool_] | None = None) -> str:
    """Median, nine in ten and mean of relative errors, from logarithms [row, 2], and how many an interval holds."""
    relative = np.expm1(errors)
    sizes = np.abs(relative)
    cells: list[str] = []
    for at in (0, 1):
        held = "–" if covered is None else f"{np.mean(covered[:, at]):.0%}"
        cells += [f"{np.median(sizes[:, at]):.1%}", f"{np.quantile(sizes[:, at], 0.9):.1%}"]
        cells += [f"{np.mean(relative[:, at]):+.1%}", held]
    return " | ".join(cells) + f" | {len(errors)}"


def judged(rows: Sequence[Measurement], servers: dict[str, ServiceEfficiency]) -> list[tuple[Any, ...]]:
    """Per row: the row, its log errors, whether the stated intervals hold what was measured, and how much of them the
    errors take."""
    found = []
    for row in rows:
        server = servers[row["backend"]]
        errors = log_errors(server, [row])[0]
        factors = interval_of(row.replica(server.on(row.device)), row.load, row.timeline)
        used = np.abs(errors) / np.log([factors.tpot, factors.ttft])
        found.append((row, errors, used <= 1, used))
    return found


def lines_of(name: str, found: Sequence[tuple[Any, ...]]) -> str:
    errors = np.array([each[1] for each in found])
    return f"| {name} | {described(errors, np.array([each[2] for each in found]))} |"


def cross(rows: Sequence[Measurement], seen: str, unseen: str, elsewhere: list[NDArray[np.float64]]) -> list[str]:
    """Lines of the rows of one system under constants from the other; how much of the intervals is taken is added to
    `elsewhere`."""
    servers = {
        name: fitted(name, own)
        for name in SETTINGS
        if (own := [row for row in rows if row["backend"] == name and row["system"] == seen])
    }
    short = {"h200_sxm": "H200", "b200_sxm": "B200"}
    here, there = short[seen], short[unseen]
    # A server that was not measured on the one has no constants.
    found = judged([row for row in rows if row["system"] == unseen and row["backend"] in servers], servers)
    elsewhere.extend(each[3] for each in found)
    own = judged([row for row in rows if row["system"] == seen], servers)
    lines = [lines_of(f"{here}, fitted to", own), lines_of(f"**{there} by constants of {here}**", found)]
    for name in servers:
        for weights in dict.fromkeys(row["weights"] for row in rows):
            own = [each for each in found if (each[0]["backend"], each[0]["weights"]) == (name, weights)]
            if own:
                lines.append(lines_of(f"{there} by constants of {here}: {name}, {weights}", own))
    return lines


def of_others(server: str, known: dict[str, ServiceEfficiency]) -> ServiceEfficiency:
    """The constants of the other servers, their geometric means, with the schedule of this one."""
    others = [each for name, each in known.items() if name != server]
    means = {name: math.exp(np.mean([math.log(getattr(each, name)) for each in others])) for name in FITTED}
    factors = {name: max(getattr(each, name) for each in others) for name in ("tpot_factor", "ttft_factor")}
    return dataclasses.replace(expected(server), **means, **factors)


def written(value: Any) -> str:
    """A value as TOML has it, with four digits."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(written, value))}]"
    return f'"{value}"' if isinstance(value, str) else f"{float(f'{value:.4g}') if isinstance(value, float) else value}"


def write_table(servers: dict[str, ServiceEfficiency]) -> None:
    """hardware/service_efficiency.toml."""
    lines = [
        "# Constants of inference servers: napkin.hardware.service_efficiency explains them. Written by",
        "# `python benchmarks/published_serving.py --fit` from the measurements of published_serving.csv, whose source",
        "# the script names. rows: fitted to; residuals: median relative errors of those; factors: nine in ten are",
        "# within them.",
    ]
    for name, server in servers.items():
        lines += ["", f"[{name}]"]
        tables = {"schedule": dataclasses.asdict(server.schedule)}
        tables |= {f'generations."{each}"': values for each, values in server.generations.items()}
        single = [each.name for each in dataclasses.fields(server) if each.name not in ("schedule", "generations")]
        lines += [f"{each} = {written(getattr(server, each))}" for each in single]
        for table, values in tables.items():
            lines += ["", f"[{name}.{table}]", *(f"{each} = {written(value)}" for each, value in values.items())]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    service_efficiencies.cache_clear()
    print(f"wrote {TABLE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the constants to all rows and write them")
    arguments = parser.parse_args()
    head = heading("Seconds per token of published services")
    rows = read_measurements()
    heads = "TPOT median | nine in ten | mean | in the interval | TTFT median | nine in ten | mean | in the interval"
    lines = [f"| relative errors | {heads} | rows |", "|" + "---|" * 10]
    if arguments.fit:
        write_table({name: fitted(name, [row for row in rows if row["backend"] == name]) for name in SETTINGS})
    peaks = np.array([roofline(row) for row in rows])
    slower = np.array([row.measured for row in rows]) / peaks
    lines.append(f"| roofline at the datasheet's peaks | {described(-np.log(slower))} |")
    prior = np.array([log_errors(expected(row["backend"]), [row])[0] for row in rows])
    lines.append(f"| expected values, nothing fitted | {described(prior)} |")
    elsewhere: list[NDArray[np.float64]] = []
    lines += cross(rows, "h200_sxm", "b200_sxm", elsewhere) + cross(rows, "b200_sxm", "h200_sxm", elsewhere)
    known = service_efficiencies()
    for name in SETTINGS:
        own = judged([row for row in rows if row["backend"] == name], {name: of_others(name, known)})
        lines.append(lines_of(f"**{name} by constants of the others**", own))
    found = judged(rows, known)
    lines.append(lines_of("all, by hardware/service_efficiency.toml, fitted to them", found))
    for name in SETTINGS:
        lines.append(lines_of(f"the same: {name}", [each for each in found if each[0]["backend"] == name]))
    fewer = [each for each in found if each[0]["backend"] == "sglang" and is_fitted_to(each[0])]
    lines.append(lines_of(f"the same: sglang, fewer than {BACKLOG_CLIENTS} clients", fewer))
    needed = np.quantile(elsewhere, 0.9, axis=0)
    median = math.exp(float(np.median(np.log(slower[:, 0]))))
    lines += [
        "",
        "Of both intervals elsewhere, nine in ten rows take " + " and ".join(f"{each:.2f}" for each in needed) + ".",
    ]
    lines += ["", f"Measured times per output token are {median:.1f} times those of the roofline, at the median."]
    names = ("system", "backend", "weights", "input_tokens", "output_tokens", "concurrency", "tensor_parallel")
    for at, figure in enumerate(("time per output token", "time to first token")):
        lines += ["", f"Furthest off, {figure}, by the constants in use:", ""]
        for row, errors, *_ in sorted(found, key=lambda each, at=at: -abs(each[1][at]))[:10]:
            lines.append(f"- {math.expm1(errors[at]):+.0%} {' '.join(row[name] for name in names)}")
    print("\n".join(lines))
    write_result("published-serving", [*head, *lines])


if __name__ == "__main__":
    main()
