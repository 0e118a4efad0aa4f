"""`napkin data reconcile`."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from napkin.cli.options import JsonOption, parse


@dataclass(frozen=True)
class ReconcileOptions(JsonOption):
    """Compare a finished corpus with its plan: documents and bytes after each stage, and the seconds of each."""

    corpus: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CORPUS")]
    """Folder of the corpus."""
    plan: str
    """The plan, as `napkin data plan --out` wrote it."""


def main(arguments: list[str]) -> None:
    """Print plan beside meter."""
    options = parse(ReconcileOptions, "data reconcile", arguments)
    from pathlib import Path

    from napkin.cli.data.plan_tables import print_reconciliation
    from napkin.cli.terminal import print_json
    from napkin.curation.engine.corpus_plan import read_plan, reconcile

    reconciled = reconcile(Path(options.corpus), read_plan(Path(options.plan)))
    if options.json:
        print_json(reconciled)
    else:
        print_reconciliation(reconciled)
