"""`napkin data plan` and `napkin data reconcile`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from napkin.cli.common.files import folder_for
from napkin.cli.common.options import JsonOption, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import print_json, print_table, say
from napkin.units import format_bytes, format_count, format_seconds, format_share

if TYPE_CHECKING:
    from napkin.curation.engine.corpus_plan import CorpusPlan, Estimate, Flow, ReconciledRow, Reconciliation


@dataclass(frozen=True)
class PlanOptions(JsonOption):
    """Predict what a pipeline will make of its input, from a sample of it: documents, bytes and tokens after each
    stage with intervals of 90%, seconds of each stage on this machine, disk and dollars. Nothing is written but the
    plan. Stages that compare documents find few duplicates in a sample: their intervals are wide, and a larger --share
    narrows them."""

    pipeline: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PIPELINE")]
    """The pipeline, a TOML file."""
    share: float = 0.001
    """Share of the input's bytes that is read, but at least 8 MB and at most 268 MB."""
    tokenizer: str | None = None
    """Tokenizer file to count tokens with; None takes 4 bytes per token."""
    workers: int | None = None
    """Processes that would work on shards; None is one per core."""
    dollars_per_core_hour: float | None = None
    """Price of a core, for the dollars of the whole run."""
    out: str | None = None
    """File for the plan, JSON, which `napkin data reconcile` compares with the corpus."""


@command("data plan", PlanOptions)
def plan_command(options: PlanOptions) -> None:
    from napkin.curation.engine.corpus_plan import plan_corpus
    from napkin.curation.engine.pipeline_file import read_pipeline
    from napkin.files import already_exists
    from napkin.hardware.host import usable_cores
    from napkin.json_files import write_json
    from napkin.tokenizer.tokenizer_file import load_tokenizer

    pipeline = read_pipeline(options.pipeline)
    tokenizer = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    path = None if options.out is None else Path(options.out)
    if path is not None and path.exists():
        raise already_exists(path)
    with progress_line("reading") as line:
        plan = plan_corpus(
            pipeline,
            share=options.share,
            count_tokens=None if tokenizer is None else lambda text: len(tokenizer.encode(text)),
            workers=usable_cores() if options.workers is None else options.workers,
            dollars_per_core_hour=options.dollars_per_core_hour,
            on_progress=lambda done, total, what: (line.retitle(what), line(done, total, ""))[0],
        )
    if path is not None:
        with folder_for(path.parent):
            write_json(path, plan)
    if options.json:
        print_json(plan)
        return
    print_plan(plan)
    if path is not None:
        say(f"wrote {path}")


@dataclass(frozen=True)
class ReconcileOptions(JsonOption):
    """Compare a finished corpus with its plan: documents and bytes after each stage, and the seconds of each."""

    corpus: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CORPUS")]
    """Folder of the corpus."""
    plan: str
    """The plan, as `napkin data plan --out` wrote it."""


@command("data reconcile", ReconcileOptions)
def reconcile_command(options: ReconcileOptions) -> None:
    from napkin.curation.engine.corpus_plan import read_plan, reconcile

    reconciled = reconcile(Path(options.corpus), read_plan(Path(options.plan)))
    if options.json:
        print_json(reconciled)
    else:
        print_reconciliation(reconciled)


def print_plan(plan: "CorpusPlan") -> None:
    """Print what is expected at each place of the pipeline, and what it takes."""
    rows = [_flow_row("read", plan.read, plan.read_seconds)]
    for stage in plan.stages:
        rows.append(_flow_row(stage.name, stage.remained, stage.seconds))
        rows += [[f"  {rule}", f"-{format_count(n)}", "", "", ""] for rule, n in _largest(stage.dropped)]
    rows.append(["written", "", format_bytes(plan.corpus_bytes), "", format_seconds(plan.write_seconds)])
    tokens = "tokens" if plan.tokens_are_counted else "tokens at 4 bytes"
    print_table(["after", "documents", "bytes of text", tokens, "seconds of a core"], rows, align="lrrrr")
    say(
        f"from a sample of {format_share(plan.sampled_share)} of the documents in {format_bytes(plan.input_bytes)}, of "
        f"{plan.sampled_files:,} of {plan.input_files:,} files; in brackets intervals of 90%"
    )
    if any(stage.compares for stage in plan.stages):
        say("stages that compare documents find few duplicates in a sample: a larger --share narrows what follows them")
    cost = "" if plan.dollars is None else f", ${plan.dollars:,.2f}"
    say(f"it takes about {format_seconds(plan.seconds)} with {plan.workers} workers{cost}")


def print_reconciliation(reconciled: "Reconciliation") -> None:
    """Plan beside meter, place by place."""
    rows = [_reconciled_row(row) for row in reconciled.rows]
    print_table(["after", "what", "planned", "metered", "meter / plan", "in the interval"], rows, align="llrrrl")
    inside = sum(row.is_inside for row in reconciled.rows)
    say(f"{inside:,} of {len(reconciled.rows):,} figures are in their intervals of 90%")
    if reconciled.stage_seconds:
        rows = [
            [name, format_seconds(planned), format_seconds(metered), f"{metered / planned:.2f}" if planned else "–"]
            for name, planned, metered in reconciled.stage_seconds
        ]
        print_table(["stage", "planned seconds", "metered seconds", "meter / plan"], rows, align="lrrr")


def _flow_row(name: str, flow: "Flow", seconds: float) -> list[str]:
    documents = _interval(flow.documents, format_count)
    return [
        name,
        documents,
        _interval(flow.bytes, format_bytes),
        _interval(flow.tokens, format_count),
        format_seconds(seconds),
    ]


def _interval(estimate: "Estimate", show: Callable[[int], str]) -> str:
    value = show(round(estimate.value))
    if estimate.low == estimate.high:
        return str(value)
    return f"{value} [{show(round(estimate.low))} – {show(round(estimate.high))}]"


def _largest(dropped: dict[str, float]) -> list[tuple[str, int]]:
    most = sorted(dropped.items(), key=lambda each: -each[1])[:5]
    return [(rule, round(n)) for rule, n in most]


def _reconciled_row(row: "ReconciledRow") -> list[str]:
    show = format_bytes if row.what == "bytes" else format_count
    ratio = f"{row.metered / row.planned.value:.3f}" if row.planned.value else "–"
    return [
        row.place,
        row.what,
        _interval(row.planned, show),
        str(show(round(row.metered))),
        ratio,
        "yes" if row.is_inside else "no",
    ]
