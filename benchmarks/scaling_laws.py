"""Scaling laws on published runs and on synthetic ones whose law is known: coefficients, errors, coverage, seconds.

    python benchmarks/scaling_laws.py --besiroglu besiroglu_2024.csv --isoflops isoflops.csv --small gadre_small.csv \\
        --large gadre_large.csv --draws 500

Each file is a CSV with parameters, tokens or training_flops, and a loss; those that are not given are left out. The
small and the large file have a column training_set. Without --large the larger half of the small file is predicted
from its smaller half. published_scaling_runs.csv beside this script is such a large file: the 37 runs above 2e19 FLOPs
of Gadre et al. 2024 (mlfoundations/scaling, MIT licence), with the loss on C4's validation text.
"""

import argparse
import time

import numpy as np

from napkin.scaling import (
    Observation,
    approach_1,
    approach_2,
    approach_2_bias,
    compare_laws,
    fit_law,
    read_observations,
)
from napkin.scaling.law_fit import scatter
from napkin.scaling.law_forms import huber
from napkin.scaling.observations import EXAMPLE, drop_highest

PUBLISHED = {"A": 477.84, "B": 2143.9, "E": 1.8172, "alpha": 0.3473, "beta": 0.3672}
TRUTH = {"A": 482.0, "B": 2085.0, "E": 1.82, "alpha": 0.348, "beta": 0.366}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--besiroglu", default=str(EXAMPLE))
    parser.add_argument("--isoflops")
    parser.add_argument("--small")
    parser.add_argument("--large")
    parser.add_argument("--draws", type=int, default=500, help="synthetic data sets per row of the coverage")
    options = parser.parse_args()
    besiroglu(options.besiroglu)
    if options.isoflops:
        isoflops(options.isoflops)
    if options.small:
        extrapolation(options.small, options.large)
    coverage(options.draws)


def besiroglu(path: str) -> None:
    runs = read_observations(path).runs
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


def extrapolation(small: str, large: str | None) -> None:
    runs = list(read_observations(small).runs)
    if large is None:
        runs.sort(key=lambda run: run.compute)
        fitted_runs, predicted = runs[: len(runs) // 2], runs[len(runs) // 2 :]
    else:
        fitted_runs, predicted = runs, list(read_observations(large).runs)
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
