"""`napkin data samples`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from napkin.cli.options import parse
from napkin.cli.terminal import say


@dataclass(frozen=True)
class SamplesOptions:
    """Write a page with samples of what each rule of each stage dropped, beside samples of what remained."""

    corpus: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CORPUS")]
    """Folder of the corpus."""
    out: str | None = None
    """The page; None is samples.html in the folder of the corpus."""


def main(arguments: list[str]) -> None:
    """Write the page."""
    options = parse(SamplesOptions, "data samples", arguments)
    from napkin.curation.engine.document_story import write_sample_page

    corpus = Path(options.corpus)
    path = corpus / "samples.html" if options.out is None else Path(options.out)
    say(f"wrote {write_sample_page(corpus, path)}")
