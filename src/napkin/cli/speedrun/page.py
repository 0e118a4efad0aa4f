"""The page of a speedrun: each stage's plan beside its meter, with what its words mean; and the same recipe, planned
for a model as large as GPT-2 on eight H100.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napkin.accounting.quantities import QuantityRow, format_figure, format_ratio
from napkin.cli.speedrun.first_plan import PATTERN, SHARES, VOCAB_SIZE, Progress
from napkin.cli.speedrun.stages import STAGES
from napkin.cli.speedrun.texts import ENVIRONMENT, MOST_CONVERSATIONS, SUMS, VALIDATION_FRACTION, WRONG
from napkin.files import atomic_write_text, refuse_unmarked
from napkin.model.config import preset
from napkin.recipe.data_config import DataConfig
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import TrainingConfig
from napkin.units import format_bytes, format_count, format_flops, format_seconds, format_share

if TYPE_CHECKING:
    from napkin.cli.speedrun.stages import SpeedrunFile

GENERATOR = b'<meta name="generator" content="napkin speedrun">'
LARGE_ON, LARGE_MODEL = "8xH100", "gpt2"
TOKENS_PER_PARAMETER = 20
LARGE_BATCH = 512
LARGE_CORES = 96
"""Cores of the nodes that are assumed to process text; their price is part of the node's."""
ROLLOUT_STEPS, ROLLOUT_ANSWERS, PROMPT_TOKENS, ANSWER_TOKENS = 300, 512, 64, 128


def write_page(folder: Path, file: "SpeedrunFile") -> Path:
    """Write speedrun.html, replacing an earlier one, and return its path."""
    from napkin.report.templates import WITHOUT_CHARTS, render
    from napkin.report.xy_picture import COLOURS

    path = folder / "speedrun.html"
    refuse_unmarked(path, GENERATOR, "a page that `napkin speedrun` wrote")
    price = file.options["usd_per_hour"]
    chat = folder / "chat.txt"
    page = render(
        "speedrun.html",
        colours=COLOURS,
        title=folder.resolve().name,
        sections={"summary": "Plan and meter"}
        | {name: stage.title for name, stage in STAGES.items()}
        | {"large": "The same on 8 × H100"},
        stages=[_stage(folder, name, file, price) for name in STAGES],
        totals=_totals(file, price),
        facts=_facts(file),
        answers=chat.read_text(encoding="utf-8") if chat.exists() else "",
        large=[_large_row(row) for row in file.large],
        large_total=_large_row(_large_total(file.large)),
        has_price=price is not None,
        **WITHOUT_CHARTS,
    )
    atomic_write_text(path, page, overwrite=True)
    return path


def _stage(folder: Path, name: str, file: "SpeedrunFile", price: float | None) -> dict[str, Any]:
    stage, about = file.stages[name], STAGES[name]
    seconds = next(row for row in stage.rows if row.quantity == "seconds")
    reports = {"pre-training": "base", "tuning": "tuned", "rewards": "rewarded"}
    report = f"{reports[name]}/report.html" if name in reports else ""
    return {
        "name": name,
        "title": about.title,
        "reads": about.reads,
        "leaves": about.leaves,
        "commands": stage.commands,
        "share": f"{SHARES[name]:.0%}",
        "seconds": [format_figure(each, "seconds") for each in (seconds.count, seconds.meter)],
        "ratio": format_ratio(seconds),
        "dollars": [_dollars(each, price) for each in (seconds.count, seconds.meter)],
        "rows": [_cells(row) for row in stage.rows],
        "has_rule": any(row.rule is not None for row in stage.rows),
        "report": report if report and (folder / report).exists() else "",
    }


def _cells(row: QuantityRow) -> dict[str, Any]:
    figures = [format_figure(each, row.unit) for each in (row.rule, row.count, row.meter)]
    return {"quantity": row.quantity, "figures": figures, "ratio": format_ratio(row), "note": row.note}


def _dollars(seconds: float | None, price: float | None) -> str:
    return "–" if seconds is None or price is None else f"${seconds / 3600 * price:,.4f}"


def _totals(file: "SpeedrunFile", price: float | None) -> dict[str, Any]:
    rows = [row for stage in file.stages.values() for row in stage.rows if row.quantity == "seconds"]
    planned, meter = sum(row.count or 0.0 for row in rows), sum(row.meter or 0.0 for row in rows)
    whole = QuantityRow("seconds", "seconds", count=planned, meter=meter)
    return {
        "seconds": [format_seconds(planned), format_seconds(meter)],
        "ratio": format_ratio(whole),
        "dollars": [_dollars(planned, price), _dollars(meter, price)],
        "planning": format_seconds(file.planning_seconds),
        "minutes": f"{file.options['minutes']:g}",
    }


def _facts(file: "SpeedrunFile") -> dict[str, str]:
    """The figures of this speedrun that the explanations quote."""
    return {
        "pages": "pages made of the docstrings of Python's own library"
        if file.made_pages
        else ", ".join(file.options["pages"]),
        "corpus_share": format_share(file.design.corpus_share),
        "input_bytes": format_bytes(file.design.input_bytes),
        "epochs": f"{file.design.epochs:.2f}",
        "crowding": f"{file.design.crowding:.2f}" if file.design.crowding > 1.05 else "",
        "vocab_size": f"{VOCAB_SIZE:,}",
        "pattern": PATTERN,
        "validation": format_share(VALIDATION_FRACTION),
        "sums": f"{SUMS:,}",
        "conversations": f"{MOST_CONVERSATIONS:,}",
        "wrong": "two of three" if round(WRONG, 2) == 0.67 else format_share(WRONG),
        "environment": ENVIRONMENT,
    }


def plan_large(file: "SpeedrunFile", progress: Progress) -> list[dict[str, Any]]:
    """The plan of the same stages for GPT-2's smallest model on eight H100: what each takes, and how that is known."""
    from napkin.planning.planner import plan as make_plan
    from napkin.planning.services.service_planner import plan_service
    from napkin.scaling.budget_answer import flops_per_step

    model = preset(LARGE_MODEL)
    recipe = Recipe(
        data=DataConfig("train.tokens", "validation.tokens", "tokenizer.json"),
        model=model,
        training=TrainingConfig(batch_size=LARGE_BATCH, precision="bf16"),
    )
    plan = make_plan(recipe, on=LARGE_ON, progress=progress)
    tokens = TOKENS_PER_PARAMETER * plan.ledger.parameters
    steps = -(-tokens // plan.tokens_per_step)
    plan = dataclasses.replace(plan, resolved=plan.resolved.with_training(steps=steps))
    flops, price = steps * flops_per_step(plan), plan.site.usd_per_hour
    rate = flops / plan.seconds
    here = {name: {row.quantity: row for row in stage.rows} for name, stage in file.stages.items()}
    per_token = _best(here, "tokens", "tokens") or 1.0
    pages = file.design.input_bytes / per_token * tokens
    grown = tokens / per_token
    cores = f"the core-seconds per byte of this machine, on {LARGE_CORES} cores"
    text = f"{format_count(tokens)} tokens need {format_bytes(pages)} of such pages; {cores}"
    trained = _best(here, "pre-training", "FLOPs") or 1.0
    ladder = (_best(here, "ladder", "FLOPs") or 0.0) / trained
    tuned = _flops(here, "tuning") / trained
    service = plan_service(
        model,
        LARGE_ON,
        concurrency=ROLLOUT_ANSWERS,
        input_tokens=PROMPT_TOKENS,
        output_tokens=ANSWER_TOKENS,
        progress=progress,
    )
    speeds = [degree.tokens_per_second for degree in service.degrees if degree.tokens_per_second is not None]
    answered = ROLLOUT_STEPS * ROLLOUT_ANSWERS * ANSWER_TOKENS
    learned = ROLLOUT_STEPS * ROLLOUT_ANSWERS * (PROMPT_TOKENS + ANSWER_TOKENS) * 6.0 * plan.ledger.parameters
    core_seconds = file.design.core_seconds
    encoding = _best(here, "tokens", "seconds") or 0.0
    rows = [
        ("corpus", core_seconds * grown / LARGE_CORES, text),
        ("tokens", encoding * grown / LARGE_CORES, f"this machine's rate, on {LARGE_CORES} cores, one here"),
        ("ladder", ladder * plan.seconds, f"{ladder:.2f} of pre-training's FLOPs, as here, at its FLOP/s"),
        (
            "pre-training",
            plan.seconds,
            f"{format_count(plan.ledger.parameters)} parameters, {format_count(tokens)} tokens, {format_flops(flops)}, "
            f"{steps:,} steps of {plan.tokens_per_step:,} tokens; counted, at {format_flops(rate)}/s",
        ),
        ("tuning", tuned * plan.seconds, f"{tuned:.3f} of pre-training's FLOPs, as here"),
        (
            "rewards",
            answered / max(speeds, default=1.0) + learned / rate,
            f"{ROLLOUT_STEPS} steps of {ROLLOUT_ANSWERS} answers of {ANSWER_TOKENS} tokens, sampled at "
            f"{max(speeds, default=0.0):,.0f} tokens/s by the plan of a service, learned from by 6·N",
        ),
    ]
    return [
        {"stage": name, "seconds": seconds, "usd": None if price is None else seconds / 3600 * price, "how": how}
        for name, seconds, how in rows
    ]


def _best(here: "dict[str, dict[str, QuantityRow]]", stage: str, quantity: str) -> float | None:
    """The metered figure, or the planned one."""
    row = here[stage].get(quantity)
    return None if row is None else float(row.meter or row.count or 0.0) or None


def _flops(here: "dict[str, dict[str, QuantityRow]]", stage: str) -> float:
    """FLOPs of a whole run: those of a step, times the run's seconds over the seconds of a step."""
    per_step, step, whole = (
        _best(here, stage, name) for name in ("FLOPs per step", "seconds per step", "seconds in all")
    )
    return per_step * whole / step if per_step and step and whole else 0.0


def _large_total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    prices = [row["usd"] for row in rows if row["usd"] is not None]
    return {
        "stage": "all",
        "seconds": sum(row["seconds"] for row in rows),
        "usd": sum(prices) if prices else None,
        "how": "one after the other, on one node",
    }


def _large_row(row: dict[str, Any]) -> list[str]:
    usd = "–" if row["usd"] is None else f"${row['usd']:,.2f}"
    return [row["stage"], f"{row['seconds'] / 3600:.3g} h", usd, row["how"]]
