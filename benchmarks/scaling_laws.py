"""Scaling laws on published runs and on synthetic ones whose law is known: coefficients, errors, coverage, seconds.

    python benchmarks/scaling_laws.py --isoflops isoflops.csv --draws 500
    python benchmarks/scaling_laws.py --only intervals

Rolling the origin: each table of runs is fitted up to each of its budgets (factors of 2 of FLOPs), and the runs beyond
are predicted. The constants of the intervals were chosen on the sources in CHOSEN, and are shown on the others.

published_scaling_runs.csv beside this script, parameters, tokens and loss to six digits:

- Gadre 2024: 103 runs on three training sets, loss on C4's validation text (mlfoundations/scaling, MIT licence).
- Misfitting 2025: 81 sizes and token counts, each with the best of its learning rates (Li, Kudugunta, Zettlemoyer;
  hadasah/scaling_laws, data/scaling_results_last_ckpt_only.csv).
- Marin 2026 dense: IsoFLOP sweeps on three training sets (Open-Athena/scaling-law-analysis,
  data/isoflops/marin_202603; runs of an older recipe at the same sizes are left out).
- Marin 2026 MoE: IsoFLOP sweeps of two recipes, macro loss on Paloma; parameters are FLOPs/6·tokens
  (marin-community/marin, experiments/grug/moe, Apache-2.0; issue 4447).
- Llama 3 2024: the report's IsoFLOP figure, read off it (Open-Athena/scaling-law-analysis, data/isoflops/llama3);
  parameters are FLOPs/6·tokens.

--isoflops is a CSV file with parameters, training_flops and a loss.
"""

import argparse
import csv
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from napkin.errors import NapkinError
from napkin.scaling import (
    Observation,
    approach_1,
    approach_2,
    approach_2_bias,
    compare_laws,
    fit_law,
    read_observations,
)
from napkin.scaling.fitted_law import FittedLaw
from napkin.scaling.law_forms import Values, huber, scatter
from napkin.scaling.observations import EXAMPLE, drop_highest
from napkin.scaling.rolling_origin import LEVEL_FACTOR
from result_files import heading

PUBLISHED = {"A": 477.84, "B": 2143.9, "E": 1.8172, "alpha": 0.3473, "beta": 0.3672}
PUBLISHED_RUNS = Path(__file__).parent / "published_scaling_runs.csv"
CHOSEN = ("Chinchilla 2022", "Gadre 2024", "Misfitting 2025")
"""Sources on which the constants of the intervals were chosen."""
SMALL = 2e19
"""FLOPs up to which the runs of Gadre et al. predict the larger ones."""
MARIN_BEST = {1e20: 2.848, 3e20: 2.725, 1e21: 2.599}
"""Macro losses of the best sizes of Marin's v16 recipe at larger budgets (marin-community/marin, issue 4447)."""
TRUTH = {"A": 482.0, "B": 2085.0, "E": 1.82, "alpha": 0.348, "beta": 0.366}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isoflops")
    parser.add_argument("--draws", type=int, default=500, help="synthetic data sets per row of the coverage")
    parser.add_argument("--only", choices=("intervals", "coverage"))
    options = parser.parse_args()
    heading("Scaling laws on published and synthetic runs")
    tables = published_tables()
    if options.only != "coverage":
        intervals(tables)
        best_losses(tables)
    if options.only is None:
        besiroglu()
        extrapolation([run for name, runs in tables.items() if name.startswith("Gadre") for run in runs])
        if options.isoflops:
            isoflops(options.isoflops)
    if options.only != "intervals":
        coverage(options.draws)


def published_tables() -> dict[str, list[Observation]]:
    """Runs by source and training set."""
    kept, _ = drop_highest(read_observations(EXAMPLE).runs, 5)
    found = {"Chinchilla 2022, MassiveText": kept}
    with PUBLISHED_RUNS.open() as lines:
        for row in csv.DictReader(lines):
            name = f"{row['source']}, {row['training_set']}"
            sizes = (float(row[each]) for each in ("parameters", "tokens", "loss"))
            found.setdefault(name, []).append(Observation(*sizes, group=row["training_set"]))
    return found


@dataclass(frozen=True)
class Rolled:
    """The runs beyond one origin, predicted by the law of those before."""

    errors: Values
    """[runs]: log of the measured loss over the predicted one."""
    halves: Values
    """[runs]: half the log of the interval's high over its low end."""
    held: Values
    """[runs]: whether the interval holds the loss."""
    before: Values
    """[runs, 2]: the ends of the interval of coefficients and scatter alone, as it was before the law's own error."""
    distances: Values
    """[runs]: FLOPs over the largest of the fitted runs."""


def rolled(runs: list[Observation], law: str) -> Iterator[Rolled]:
    """Each origin with eight runs and two more than the law has coefficients, at factors of 2 of FLOPs."""
    compute = np.array([run.compute for run in runs])
    levels = np.floor(np.log(compute / compute.min() * (1 + 1e-4)) / np.log(LEVEL_FACTOR))
    for level in np.unique(levels)[:-1]:
        fitted = [run for run, own in zip(runs, levels, strict=True) if own <= level]
        beyond = [run for run, own in zip(runs, levels, strict=True) if own > level]
        try:
            if len(fitted) < 8:
                continue
            found = fit_law(fitted, law).law
            if len(fitted) < len(found.theta) + 2:
                continue
        except NapkinError:
            continue
        predicted = [found.predict(run.parameters, run.tokens, group=run.group) for run in beyond]
        measured = np.array([run.loss for run in beyond])
        yield Rolled(
            errors=np.log(measured / [each.estimate for each in predicted]),
            halves=np.log([each.high / each.low for each in predicted]) / 2,
            held=np.array([run.loss in each for run, each in zip(beyond, predicted, strict=True)]),
            before=_before(found, beyond),
            distances=np.array([run.compute for run in beyond]) / max(run.compute for run in fitted),
        )


def _before(law: FittedLaw, runs: list[Observation]) -> Values:
    names = ("parameters", "tokens", "compute")
    variables = {name: np.array([getattr(run, name) for run in runs]) for name in names}
    terms = law.model.terms(variables, [run.group for run in runs])
    spread = terms.log_losses(law.draws) - terms.log_losses(law.theta[None])
    both = (spread[:, None, :] + np.array(law.content.residuals)[None, :, None]).reshape(-1, len(runs))
    return np.quantile(both, [0.05, 0.95], axis=0).T


def intervals(tables: dict[str, list[Observation]]) -> None:
    print("## 90% intervals by rolling the origin over budgets (law chinchilla)\n")
    print("| source | | runs | origins | predictions | median error | hold | median half width | hold before | width |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    rows = {name: list(rolled(runs, "chinchilla")) for name, runs in tables.items()}
    pooled: dict[bool, list[Rolled]] = {True: [], False: []}
    for name, found in rows.items():
        chosen = name.startswith(CHOSEN)
        pooled[chosen] += found
        _row(name, "chosen" if chosen else "shown", len(tables[name]), found)
    for chosen, found in pooled.items():
        runs = sum(len(each) for name, each in tables.items() if name.startswith(CHOSEN) == chosen)
        _row("**all chosen**" if chosen else "**all shown**", "", runs, found)
    errors = np.abs(np.concatenate([each.errors for each in pooled[True]]))
    constant = float(np.quantile(errors, 0.9))
    shown = np.abs(np.concatenate([each.errors for each in pooled[False]]))
    print(
        f"\nA constant ±{100 * constant:.1f}%, which holds 90% where constants were chosen, holds "
        f"{100 * np.mean(shown <= constant):.0f}% where they are shown."
    )
    print("\n| FLOPs over the largest run | predictions shown | median error | hold | median half width |")
    print("|---|---|---|---|---|")
    distances, halves, held = (
        np.concatenate([getattr(each, name) for each in pooled[False]]) for name in ("distances", "halves", "held")
    )
    for low, high in ((1, 2), (2, 4), (4, 16), (16, 1e9)):
        own = (distances > low) & (distances <= high)
        label = f"{low} to {high:g}" if high < 1e9 else f"beyond {low}"
        print(
            f"| {label} | {own.sum()} | {100 * np.median(shown[own]):.2f}% | {100 * np.mean(held[own]):.0f}% | "
            f"±{100 * np.median(halves[own]):.1f}% |"
        )
    print("\n| law | predictions shown | median error | hold | median half width |\n|---|---|---|---|---|")
    for law in ("chinchilla", "gadre", "kaplan"):
        found = (
            [each for name, runs in tables.items() if not name.startswith(CHOSEN) for each in rolled(runs, law)]
            if law != "chinchilla"
            else pooled[False]
        )
        errors = np.abs(np.concatenate([each.errors for each in found]))
        print(
            f"| {law} | {len(errors)} | {100 * np.median(errors):.2f}% | "
            f"{100 * np.mean(np.concatenate([each.held for each in found])):.0f}% | "
            f"±{100 * np.median(np.concatenate([each.halves for each in found])):.1f}% |"
        )
    print()


def best_losses(tables: dict[str, list[Observation]]) -> None:
    """Minima of IsoFLOP parabolas, predicted from those of fewer FLOPs by a law of them, and by one of all runs."""
    print("## Losses of the best sizes, by E + K/C^gamma through those of smaller budgets\n")
    print("| source | budgets | predicted | FLOPs up to | median error | hold | half width | error of chinchilla |")
    print("|---|---|---|---|---|---|---|---|")
    for name, runs in tables.items():
        try:
            found = approach_2([replace(run, group="") for run in runs])
        except NapkinError:
            continue
        best = sorted((each for each in found.best if not each.at_edge), key=lambda each: each.flops)
        minima = [Observation(each.parameters, each.tokens, each.loss, flops=each.flops) for each in best]
        errors, others, held, halves, times = [], [], [], [], 1.0
        for count in range(4, len(minima)):
            law = fit_law(minima[:count], "kaplan-c").law
            whole = fit_law([run for run in runs if run.compute <= best[count - 1].flops * 1.1], draws=2).law
            for run in minima[count:]:
                predicted = law.predict(run.parameters, run.tokens, flops=run.flops)
                errors.append(abs(np.log(run.loss / predicted.estimate)))
                others.append(abs(np.log(run.loss / whole.mean_loss(run.parameters, run.tokens))))
                held.append(run.loss in predicted)
                halves.append(predicted.relative)
                times = max(times, run.compute / best[count - 1].flops)
        if errors:
            print(
                f"| {name} | {len(best)} | {len(errors)} | {times:.0f} × | {100 * np.median(errors):.2f}% | "
                f"{sum(held)} | ±{100 * np.median(halves):.1f}% | {100 * np.median(others):.2f}% |"
            )
    v16 = approach_2([replace(run, group="") for run in tables["Marin 2026 MoE, v16"]])
    losses = [v16.best_loss(flops) for flops in MARIN_BEST]
    print("\nMarin's v16 from its four budgets up to 3e19 FLOPs, beside what was measured there:\n")
    for (flops, measured), loss in zip(MARIN_BEST.items(), losses, strict=True):
        assert loss is not None
        print(f"- {flops:.0e}: {loss.estimate:.3f} ({loss.low:.3f} to {loss.high:.3f}), measured {measured}")
    print()


def _row(name: str, use: str, runs: int, found: list[Rolled]) -> None:
    errors, halves, held = (
        np.concatenate([getattr(each, key) for each in found]) for key in ("errors", "halves", "held")
    )
    before = np.concatenate([each.before for each in found])
    held_before = np.mean((errors >= before[:, 0]) & (errors <= before[:, 1]))
    width = np.median(before[:, 1] - before[:, 0]) / 2
    print(
        f"| {name} | {use} | {runs} | {len(found)} | {len(errors)} | {100 * np.median(np.abs(errors)):.2f}% | "
        f"{100 * np.mean(held):.0f}% | ±{100 * np.median(halves):.1f}% | {100 * held_before:.0f}% | "
        f"±{100 * width:.1f}% |"
    )


def besiroglu() -> None:
    runs = read_observations(EXAMPLE).runs
    kept, dropped = drop_highest(runs, 5)
    begin = time.perf_counter()
    fitted = fit_law(kept, delta=1e-3)
    seconds = time.perf_counter() - begin
    whole = fit_law([*kept, *dropped], delta=1e-3, draws=2)
    print(f"## Chinchilla's runs (Besiroglu et al. 2024): {len(kept)} runs in {seconds:.2f} s with 200 bootstrap draws")
    print("\n| | published | found | 90% | with the five dropped |\n|---|---|---|---|---|")
    for name, value in PUBLISHED.items():
        each, with_five = fitted.law.coefficients[""][name], whole.law.coefficients[""][name].estimate
        print(f"| {name} | {value:g} | {each.estimate:.6g} | {each.low:.4g} to {each.high:.4g} | {with_five:.5g} |")
    ours = float(huber(fitted.residuals, 1e-3).sum())
    theirs = float(
        huber(np.log([run.loss for run in kept]) - np.log([_loss(run, PUBLISHED) for run in kept]), 1e-3).sum()
    )
    print(f"\nsum of Huber losses: {ours:.10e} here, {theirs:.10e} at the published digits\n")


def _loss(run: Observation, law: dict[str, float]) -> float:
    return law["E"] + law["A"] / run.parameters ** law["alpha"] + law["B"] / run.tokens ** law["beta"]


def isoflops(path: str) -> None:
    runs = read_observations(path).runs
    fitted = fit_law(runs)
    print(f"## IsoFLOP curves: {len(runs)} runs\n")
    print(
        "| | exponent of parameters | parameters at 1e23 | at 1e24 | tokens at 1e23 | at 1e24 |\n"
        "|---|---|---|---|---|---|"
    )
    for name, law in (("approach 1", approach_1(runs)), ("approach 2", approach_2(runs))):
        exponent = law.parameters.exponents["flops"]
        optima = [law.optimum(flops) for flops in (1e23, 1e24)]
        cells = [_span(each, "{:.4f}") for each in (exponent,)] + [
            _span(optimum[index], "{:.4g}") for index in (0, 1) for optimum in optima
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    found = [fitted.law.optimum(flops) for flops in (1e23, 1e24)]
    slope = np.log(found[1].parameters.estimate / found[0].parameters.estimate) / np.log(10)
    cells = [f"{each.parameters.estimate:.4g}" for each in found] + [f"{each.tokens.estimate:.4g}" for each in found]
    print(f"| approach 3, rms {fitted.rms:.1e} | {slope:.4f} | {' | '.join(cells)} |")
    for flops in (1e23, 1e24):
        bias = approach_2_bias(runs, fitted.law, flops)
        print(
            f"\nbias of approach 2 without noise at {flops:.0e} FLOPs: {100 * bias.relative:+.2f}% in parameters",
            end="",
        )
    print("\n")


def _span(interval, form: str) -> str:
    return f"{form.format(interval.estimate)} ({form.format(interval.low)} to {form.format(interval.high)})"


def extrapolation(runs: list[Observation]) -> None:
    fitted_runs = [run for run in runs if run.compute <= SMALL]
    predicted = [run for run in runs if run.compute > SMALL]
    print(
        f"## {len(fitted_runs)} runs up to {max(run.compute for run in fitted_runs):.2g} FLOPs predict "
        f"{len(predicted)} others\n"
    )
    print(
        "| law | delta | median error | p90 | bias | in 90% interval | half width | by training set |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for law in ("chinchilla", "gadre", "kaplan"):
        for delta in (None, 1e-3, 5e-3, 2e-2):
            fitted = fit_law(fitted_runs, law, delta=delta)
            found = [(run, fitted.law.predict(run.parameters, run.tokens, group=run.group)) for run in predicted]
            errors = np.array([run.loss / each.estimate - 1 for run, each in found])
            held = np.mean([run.loss in each for run, each in found])
            groups = []
            for group in fitted.law.groups:
                own = [abs(error) for (run, _), error in zip(found, errors, strict=True) if run.group == group]
                groups.append(f"{100 * np.median(own):.2f}")
            name = f"{fitted.delta:.1e}" + (" (default)" if delta is None else "")
            print(
                f"| {law} | {name} | {100 * np.median(abs(errors)):.2f}% | "
                f"{100 * np.quantile(abs(errors), 0.9):.2f}% | {100 * np.median(errors):+.2f}% | {100 * held:.0f}% | "
                f"{100 * np.median([each.relative for _, each in found]):.1f}% | {', '.join(groups)}% |"
            )
    everything = [*fitted_runs, *predicted]
    print(
        f"\nscatter of all {len(everything)} runs about one chinchilla law: "
        f"{100 * scatter(fit_law(everything).residuals):.2f}%"
    )
    best = compare_laws(fitted_runs).scores[0]
    print(
        f"within the small runs alone, `compare` finds {best.law} best: {100 * best.median_error:.2f}% median error\n"
    )


def coverage(repetitions: int) -> None:
    print(f"## Coverage of 90% intervals over {repetitions} synthetic data sets of chinchilla's law\n")
    print("| runs | noise | design | alpha | beta | best size at 8 × | new run at 8 × | half width of it | s per fit |")
    print("|---|---|---|---|---|---|---|---|---|")
    for count, noise, design in (
        (9, 0.003, "ladder"),
        (12, 0.003, "ladder"),
        (15, 0.003, "ladder"),
        (20, 0.005, "wide"),
        (60, 0.005, "wide"),
        (60, 0.005, "wide, a run in ten diverged"),
        (240, 0.005, "wide"),
    ):
        held, widths = np.zeros(4), []
        begin = time.perf_counter()
        for seed in range(repetitions):
            random = np.random.default_rng(seed)
            runs = synthetic(random, count, noise, design)
            law = fit_law(runs).law
            flops = 8 * law.ranges["compute"][1]
            size = (flops / 120) ** 0.5
            tokens = flops / 6 / size
            new = _loss(Observation(size, tokens, 1.0), TRUTH) * float(np.exp(random.normal(0, noise)))
            predicted = law.predict(size, tokens)
            found = law.coefficients[""]
            best = _best_size(flops)
            held += [
                TRUTH["alpha"] in found["alpha"],
                TRUTH["beta"] in found["beta"],
                best in law.optimum(flops).parameters,
                new in predicted,
            ]
            widths.append(predicted.relative)
        seconds = (time.perf_counter() - begin) / repetitions
        shares = " | ".join(f"{100 * share:.0f}%" for share in held / repetitions)
        print(
            f"| {count} | {100 * noise:.1f}% | {design} | {shares} | {100 * np.median(widths):.2f}% | {seconds:.2f} |"
        )


def synthetic(random: np.random.Generator, count: int, noise: float, design: str) -> list[Observation]:
    if design == "ladder":
        # IsoFLOP curves of three sizes each.
        budgets = np.repeat(np.geomspace(1e17, 1e19, count // 3), 3)
        sizes = (budgets / 120) ** 0.5 * np.tile([0.4, 1.0, 2.5], count // 3)
        tokens = budgets / 6 / sizes
    else:
        sizes = 10 ** random.uniform(7, 9.5, count)
        tokens = sizes * 10 ** random.uniform(0.5, 2.5, count)
    factors = np.exp(random.normal(0, noise, count))
    if "diverged" in design:
        factors[::10] *= np.exp(random.uniform(0.05, 0.5, len(factors[::10])))
    runs = [Observation(float(n), float(d), 1.0) for n, d in zip(sizes, tokens, strict=True)]
    return [
        Observation(run.parameters, run.tokens, _loss(run, TRUTH) * float(factor))
        for run, factor in zip(runs, factors, strict=True)
    ]


def _best_size(flops: float) -> float:
    a, b = TRUTH["alpha"], TRUTH["beta"]
    return (a * TRUTH["A"] / (b * TRUTH["B"])) ** (1 / (a + b)) * (flops / 6) ** (b / (a + b))


if __name__ == "__main__":
    main()
