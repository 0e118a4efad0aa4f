"""`napkin data plan` and `napkin data reconcile`."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from napkin.cli.common.options import JsonOption, command


@dataclass(frozen=True)
class PlanOptions(JsonOption):
    """Predict what a pipeline will make of its input, from a sample of it: documents, bytes and tokens after each
    stage with intervals of 90%, seconds of each stage on this machine, disk and dollars. Nothing is written but the
    plan. Stages that compare documents find few duplicates in a sample: their intervals are wide, and a larger --share
    narrows them."""

    pipeline: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PIPELINE")]
    """The pipeline, a TOML file."""
    share: float = 0.001
    """Of the input's bytes that is read: at least 8 MB, at most 268 MB."""
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
    from pathlib import Path

    from napkin.cli.common.files import folder_for
    from napkin.cli.common.progress import progress_line
    from napkin.cli.common.terminal import print_json, say
    from napkin.cli.data.plan_tables import print_plan
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
    from pathlib import Path

    from napkin.cli.common.terminal import print_json
    from napkin.cli.data.plan_tables import print_reconciliation
    from napkin.curation.engine.corpus_plan import read_plan, reconcile

    reconciled = reconcile(Path(options.corpus), read_plan(Path(options.plan)))
    if options.json:
        print_json(reconciled)
    else:
        print_reconciliation(reconciled)
