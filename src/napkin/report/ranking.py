"""Which of several runs predicts unseen text best, said in words, and which of them cannot be compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from napkin.report.comparison import ComparedRun
from napkin.units import format_three_digits


@dataclass(frozen=True)
class Ranking:
    """Runs in the order of a figure that compares them."""

    by: Literal["validation loss", "bits per byte"] | None
    """None where nothing compares the runs; `ranked` are then those with a validation loss, in the order of the
    files that they were validated on."""
    ranked: tuple[ComparedRun, ...]
    """The best first."""
    others: tuple[ComparedRun, ...]
    """Runs that lack the figure."""
    statements: tuple[str, ...]
    """What there is to say, a sentence or two each."""


def rank(runs: Sequence[ComparedRun]) -> Ranking:
    """Rank runs by their lowest validation loss or, where their losses are not of the same tokens, by bits per byte."""
    validated = [run for run in runs if run.summary.best_validation_loss is not None]
    obstacle = _obstacle(validated)
    if not obstacle:
        ranked = sorted(validated, key=_best_loss)
        lead = _validation_leaders(ranked)
        return _ranking("validation loss" if ranked else None, ranked, runs, [*lead, *_training_leader(ranked)])
    evaluated = [run for run in runs if run.evaluation is not None]
    if len(evaluated) > 1 and len({_evaluated_text(run) for run in evaluated}) == 1:
        ranked = sorted(evaluated, key=_bits_per_byte)
        lead = [f"{obstacle} The runs are compared by bits per byte of the same text instead.", *_bits_leader(ranked)]
        return _ranking("bits per byte", ranked, runs, lead)
    lead = f"{obstacle} `napkin evaluate` gives bits per byte, which compare the runs where they are of the same text."
    return _ranking(None, sorted(validated, key=lambda run: (str(_measured_on(run)), _best_loss(run))), runs, [lead])


def differences(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """The values of each recipe where they are not the same in all, by "table.name"; "–" is not set."""
    names = {name: None for run in runs for name in run.recipe}
    shown = {name: [_value(run.recipe.get(name)) for run in runs] for name in names}
    return {name: values for name, values in shown.items() if len(set(values)) > 1}


def _ranking(by: Any, ranked: list[ComparedRun], runs: Sequence[ComparedRun], lead: list[str]) -> Ranking:
    others = [run for run in runs if run not in ranked]
    overfitted = [f"{run.summary.name} is overfitted: {run.overfitting}." for run in runs if run.overfitting]
    return Ranking(by, tuple(ranked), tuple(others), (*lead, *overfitted, *_left_out(by, others)))


def _left_out(by: str | None, others: list[ComparedRun]) -> list[str]:
    if not others:
        return []
    names, verb = _names(others), "has" if len(others) == 1 else "have"
    return [f"{names} {verb} no {by or 'validation loss'} and cannot be ranked: a training loss does not replace it."]


def _validation_leaders(ranked: list[ComparedRun]) -> list[str]:
    """Who leads. An overfitted run leads with weights that it no longer has at its end."""
    if len(ranked) < 2:
        return []
    best = ranked[0].summary
    equal = [run for run in ranked if run.summary.best_validation_loss == best.best_validation_loss]
    if len(equal) > 1:
        return [
            f"{_names(equal)} have the same lowest validation loss, {best.best_validation_loss:.4f} nats per token."
        ]
    lead = f"{best.best_validation_loss:.4f} nats per token at step {best.best_validation_step:,}"
    at_end = min(ranked, key=lambda run: run.summary.validation_loss or 0.0).summary
    end = f"the lowest validation loss at the end is that of {at_end.name}, {at_end.validation_loss:.4f}"
    if ranked[0].overfitting:
        return [
            f"{best.name} came to the lowest validation loss, {lead}, but not with its last weights: "
            f"{best.validation_loss:.4f} at its end; {end}."
        ]
    return [f"{best.name} has the lowest validation loss, {lead}{'' if at_end is best else f'; {end}'}."]


def _training_leader(ranked: list[ComparedRun]) -> list[str]:
    """A warning where the lowest training loss is that of another run."""
    known = [run for run in ranked if run.summary.loss is not None]
    if len(known) < 2:
        return []
    lowest = min(known, key=lambda run: run.summary.loss or 0.0)
    if lowest is ranked[0]:
        return []
    return [
        f"The lowest training loss is that of {lowest.summary.name}, {lowest.summary.loss:.4f}. It does not make that "
        "run the best: it says how well a model predicts the text that it was trained on."
    ]


def _bits_leader(ranked: list[ComparedRun]) -> list[str]:
    best = ranked[0]
    assert best.evaluation is not None
    bits, step = format_three_digits(best.evaluation.bits_per_byte), best.evaluation.step
    return [f"{best.summary.name} has the fewest bits per byte, {bits} at step {step:,}."]


def _obstacle(validated: list[ComparedRun]) -> str:
    """Why the validation losses cannot be compared; "" if they can."""
    if len({_measured_on(run) for run in validated}) < 2:
        return ""
    if len({run.tokenizer for run in validated}) > 1:
        return "The losses cannot be compared: the runs have different tokenizers, and a loss is per token."
    return "The losses cannot be compared: the runs were validated on different token files."


def _measured_on(run: ComparedRun) -> tuple[str | None, str]:
    return run.tokenizer, str(run.recipe.get("data.validation"))


def _evaluated_text(run: ComparedRun) -> tuple[Any, ...]:
    # Two texts of the same length that compress alike twice are the same one.
    found = run.evaluation
    assert found is not None
    return found.bytes, found.xz_bits_per_byte, found.gzip_bits_per_byte


def _best_loss(run: ComparedRun) -> float:
    best = run.summary.best_validation_loss
    assert best is not None
    return best


def _bits_per_byte(run: ComparedRun) -> float:
    assert run.evaluation is not None
    return run.evaluation.bits_per_byte


def _names(runs: list[ComparedRun]) -> str:
    names = [run.summary.name for run in runs]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _value(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)
