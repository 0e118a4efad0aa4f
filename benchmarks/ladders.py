"""Ladders on several texts, and on each a run of 8 times the FLOPs of its largest beside the prediction.

A text is a file; stdlib: is Python's own library. Each ladder has four levels of FLOPs, 2.5 times apart, of three sizes
each (sizes that fall on one shape are one run), and each run is evaluated on 131,072 tokens. A second call continues
what the first has left.

    python benchmarks/ladders.py --flops 6e11 stdlib: c.txt perl.txt     # ten minutes each on a quiet core

The table is also written to benchmarks/results/.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from napkin.cli import main as napkin
from napkin.errors import NapkinError
from napkin.files import cache_folder
from napkin.model.config import ModelConfig
from napkin.planning.planner import SharedPlans
from napkin.recipe.data_config import DataConfig
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import format_recipe
from napkin.recipe.training_config import TrainingConfig
from napkin.runs.run_folder import is_run
from napkin.scaling.fitted_law import Interval
from napkin.scaling.ladder import Design, Ladder, ladder_file_of, read_ladder, write_ladder
from napkin.scaling.law_fit import fit_law
from napkin.scaling.observations import Observation, read_run_observations
from napkin.units import format_flops
from result_files import heading, write_result

LEVELS, FACTOR, TIMES = 4, 2.5, 8.0


@dataclass(frozen=True)
class Outcome:
    """A finished ladder and the run after it."""

    name: str
    runs: tuple[Observation, ...]
    large: Observation


def main() -> None:
    """Train the ladders and the runs after them; print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", default=["stdlib:"])
    parser.add_argument("--flops", type=float, default=6e11, help="FLOPs of the largest level")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=cache_folder() / "benchmarks" / "ladders")
    options = parser.parse_args()
    head = heading("Ladders on several texts, and the runs that they predict", "Runs on one thread.")
    found = []
    for text in options.texts:
        name = f"{'stdlib' if text == 'stdlib:' else Path(text).stem}-{options.seed}"
        try:
            found.append(climb(text, name, options.folder / name, options.flops, options.seed))
        except NapkinError as error:
            parser.error(f"--flops {options.flops:g}: {error}")
    write_result("ladders", [*head, *table(found)])


def climb(text: str, name: str, folder: Path, flops: float, seed: int) -> Outcome:
    """Train a ladder whose largest level has so many FLOPs, and the run of 8 times as many."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, runs, large = folder / "tokenizer.json", folder / "ladder", folder / "large"
    if not tokenizer.exists():
        _call("tokenizer", "train", text, "--vocab-size", "1024", "--out", str(tokenizer))
    if not (folder / "validation.tokens").exists():
        _call("tokenizer", "encode", text, "--tokenizer", str(tokenizer), "--out", str(folder))
    base = Recipe(
        data=DataConfig(str(folder / "train.tokens"), str(folder / "validation.tokens"), str(tokenizer)),
        model=ModelConfig(context_length=128, d_model=64, n_layers=2, n_heads=4),
        training=TrainingConfig(
            batch_size=16, threads=1, log_every=100, init_seed=seed, data_seed=seed, evaluation_tokens=16_384
        ),
    )
    recipe = folder / "recipe.toml"
    recipe.write_text(format_recipe(base))
    if read_ladder(runs) is None:
        # Devices of the catalogue need no probe runs here, and the recipes name no device.
        ladder = Ladder(base, Design(tokens_per_parameter=8), "T4", SharedPlans())
        levels = [flops * FACTOR ** (level + 1 - LEVELS) for level in range(LEVELS)]
        rungs = tuple(ladder.rung(level, size) for level in levels for size in (0.5, 1.0, 2.0))
        write_ladder(runs, ladder_file_of(rungs, ladder.rung(TIMES * flops)))
    _call("ladder", str(recipe), "--run", "--at-once", "1", "--runs", str(runs))
    _call(*(("resume", str(large)) if is_run(large) else ("train", str(runs / "next.toml"), "--run", str(large))))
    return Outcome(name, read_run_observations([str(runs)]).runs, read_run_observations([str(large)]).runs[0])


def table(found: list[Outcome]) -> list[str]:
    """The predictions beside what was measured, by the interval and by that without the law's own error."""
    lines = ["| text and seed | runs | FLOPs | predicted at 8 × | 90% | measured | error | holds | before |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    held, held_before, errors, halves = 0, 0, [], []
    for each in found:
        law = fit_law(each.runs).law
        loss = law.predict(each.large.parameters, each.large.tokens, flops=each.large.flops)
        sizes = {name: np.array([getattr(each.large, name)]) for name in ("parameters", "tokens", "compute")}
        drawn = law.model.terms(sizes, [""]).log_losses(law.draws)[:, 0]
        both = (drawn[:, None] + np.array(law.content.residuals)[None]).ravel()
        before = Interval(loss.estimate, *(float(end) for end in np.exp(np.quantile(both, [0.05, 0.95]))))
        held, held_before = held + (each.large.loss in loss), held_before + (each.large.loss in before)
        errors.append(each.large.loss / loss.estimate - 1)
        halves.append((loss.relative, before.relative))
        least, most = law.ranges["compute"]
        lines.append(
            f"| {each.name} | {len(each.runs)} | {format_flops(least)} to {format_flops(most)} | {loss.estimate:.3f} | "
            f"{loss.low:.3f} to {loss.high:.3f} | {each.large.loss:.3f} | {100 * errors[-1]:+.2f}% | "
            f"{'yes' if each.large.loss in loss else 'no'} | {'yes' if each.large.loss in before else 'no'}, "
            f"±{100 * before.relative:.1f}% |"
        )
    half, half_before = np.median(halves, axis=0)
    lines += [
        "",
        f"{held} of {len(found)} hold at a median half width of ±{100 * half:.1f}%, before {held_before} at "
        f"±{100 * half_before:.1f}%; the median error is {100 * np.median(np.abs(errors)):.1f}%, and "
        f"{sum(abs(error) <= 0.02 for error in errors)} are within 2%.",
        "",
        "| text and seed | FLOPs | parameters | tokens | loss |",
        "|---|---|---|---|---|",
    ]
    for each in found:
        for run in (*sorted(each.runs, key=lambda run: run.compute), each.large):
            row = f"{run.compute:.4g} | {run.parameters:.0f} | {run.tokens:.0f} | {run.loss:.4f}"
            lines.append(f"| {each.name} | {row} |")
    print("\n".join(lines))
    return lines


def _call(*command: str) -> None:
    if status := napkin(list(command)):
        raise SystemExit(status)


if __name__ == "__main__":
    main()
