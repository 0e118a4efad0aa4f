"""How fast layouts are searched, and how long a plan takes for 8 and for 16,384 devices.

    python benchmarks/layout_search.py

Seconds are those of this process on one core. The search is of llama-3-70b on 512 H100.
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator

from napkin.hardware.device_file import find_device
from napkin.model.config import preset
from napkin.planning.layouts.costs import Choice, LayoutCosts
from napkin.planning.layouts.layout_plan import plan_layout
from napkin.planning.layouts.search import search_layouts, tensor_sizes
from napkin.planning.planner import resolve
from napkin.planning.step.machine import CatalogueMachine
from napkin.recipe.layout import Layout
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import TrainingConfig
from result_files import heading, write_result
from turns import BRACKETS, Samples, spread


def costs_of(n_devices: int, batch_size: int) -> LayoutCosts:
    """Of llama-3-70b on so many H100."""
    device = find_device("H100")
    recipe = Recipe(model=preset("llama-3-70b"), training=TrainingConfig(batch_size=batch_size))
    resolved = dataclasses.replace(resolve(recipe, CatalogueMachine(device)), world_size=n_devices)
    return LayoutCosts(resolved, CatalogueMachine(device, n_devices), tensor_sizes(resolved, n_devices))


def one_round() -> Iterator[tuple[str, float]]:
    """Each part, and its seconds."""
    start = time.process_time()
    costs = costs_of(512, 512)
    for recompute in ("none", "selective", "full"):
        costs.parts(recompute)
    counted = time.process_time()
    found = search_layouts(costs, trains=False)
    seconds = time.process_time() - counted
    yield "counting blocks, once", counted - start
    yield f"searching {found.considered:,} layouts, {found.evaluated:,} worked out", seconds
    yield "10,000 layouts, counting included", counted - start + 1e4 * seconds / found.considered
    for n_devices, layout in (
        (8, Layout(tensor=8)),
        (16384, Layout(tensor=8, pipeline=16, data=128, schedule="interleaved-1f1b", stages_per_rank=5)),
    ):
        start = time.process_time()
        costs = costs_of(n_devices, 2048)
        plan_layout(
            costs.resolved, costs.machine, Choice(layout=layout, micro_batch_size=1, loss_chunk_size=4096), costs=costs
        )
        yield f"a plan for {n_devices:,} devices", time.process_time() - start


def main() -> None:
    """Print the seconds of a search and of plans."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    head = heading("Seconds of processor time of a search for a layout", BRACKETS)
    samples: Samples = {}
    for _ in range(options.rounds):
        for what, seconds in one_round():
            samples.setdefault(what, []).append(seconds)
    lines = ["| what | seconds |", "|---|---|"]
    lines += [f"| {what} | {spread(seconds)} |" for what, seconds in samples.items()]
    print("\n".join(lines))
    write_result("layout-search", [*head, *lines])


if __name__ == "__main__":
    main()
