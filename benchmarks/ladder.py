"""A ladder on this machine, the law of its runs, and a run of 8 times the FLOPs of its largest beside the prediction.

The text is Python's own library. The ladder takes --seconds by its plan, one run after the other; the large run
takes about as long again. A second call continues what the first has left.

    python benchmarks/ladder.py        # some fifteen minutes on two quiet cores

The table is also written to benchmarks/results/.
"""

import argparse
from pathlib import Path

from library_text import library_text
from napkin.cli import main as napkin
from napkin.files import cache_folder
from napkin.model.config import ModelConfig
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import format_recipe, read_recipe
from napkin.recipe.training_config import TrainingConfig
from napkin.report.comparison import read_run
from napkin.runs.run_folder import is_run
from napkin.scaling.fitted_law import read_law
from napkin.scaling.ladder import predict, read_ladder
from napkin.scaling.law_fit import fit_law
from napkin.scaling.observations import read_run_observations
from napkin.units import format_flops, format_seconds
from result_files import heading, write_result

LAWS = ("chinchilla", "gadre", "kaplan", "kaplan-c")


def main() -> None:
    """Train, predict, train the large run, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--folder", type=Path, default=cache_folder() / "benchmarks" / "ladder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--level-factor", type=float, default=2.5)
    parser.add_argument("--only-ladder", action="store_true", help="leave the large run out")
    options = parser.parse_args()
    head = heading("A ladder of runs, and the run that it predicts", f"Runs on {options.threads} threads.")
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    recipe, ladder, large = folder / "recipe.toml", folder / "ladder", folder / "large"
    base = Recipe(
        data=library_text(1024),
        model=ModelConfig(context_length=128, d_model=64, n_layers=2, n_heads=4),
        training=TrainingConfig(batch_size=16, threads=options.threads, log_every=10),
    )
    recipe.write_text(format_recipe(base))
    levels = f"--levels 4 --sizes 3 --level-factor {options.level_factor}"
    design = f"--seconds {options.seconds} {levels} --tokens-per-parameter 8"
    _call("ladder", str(recipe), *design.split(), "--run", "--at-once", "1", "--runs", str(ladder))
    _print_laws(ladder)
    if options.only_ladder:
        return
    _call(*(("resume", str(large)) if is_run(large) else ("train", str(ladder / "next.toml"), "--run", str(large))))
    write_result("ladder", [*head, *table(ladder, large)])


def _print_laws(ladder: Path) -> None:
    """What each law predicts of the large run."""
    file = read_ladder(ladder)
    assert file is not None
    assert file.next is not None
    runs = read_run_observations([str(ladder)]).runs
    for law in LAWS:
        found = fit_law(runs, law)
        loss = predict(found.law, file.next.parsed).loss
        print(f"{law}: {loss.estimate:.4f}, {loss.low:.4f} to {loss.high:.4f}, scatter {found.rms:.2%} of {len(runs)}")


def table(ladder: Path, large: Path) -> list[str]:
    """A row for each run, and the prediction beside what was measured; also printed."""
    runs = [read_run(path.parent, training=False).summary for path in sorted(ladder.glob("*/recipe.toml"))]
    found = read_run(large, training=False).summary
    predicted = predict(read_law(ladder / "law.json"), read_recipe(ladder / "next.toml"))
    loss, measured = predicted.loss, found.validation_loss
    assert measured is not None
    inside = "inside" if measured in loss else "outside"
    largest = max(run.flops or 0.0 for run in runs)
    lines = [
        "| run | FLOPs | validation loss | seconds |",
        "| --- | ---: | ---: | ---: |",
        *(
            f"| {run.name} | {format_flops(run.flops or 0.0)} | {run.validation_loss:.4f} | {run.seconds:.1f} |"
            for run in (*runs, found)
        ),
        "",
        f"The ladder took {format_seconds(sum(run.seconds for run in runs))}. A run of {predicted.flops / largest:.1f} "
        f"times the FLOPs of its largest was predicted to reach {loss.estimate:.4f}, 90% interval {loss.low:.4f} to "
        f"{loss.high:.4f} (± {loss.relative:.2%}); measured {measured:.4f}, {measured / loss.estimate - 1:+.2%}, "
        f"{inside} the interval.",
    ]
    print("\n".join(lines))
    return lines


def _call(*command: str) -> None:
    if status := napkin(list(command)):
        raise SystemExit(status)


if __name__ == "__main__":
    main()
