"""`napkin data why` and `napkin data samples`: what became of documents."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from napkin.cli.common.options import JsonOption, command
from napkin.cli.common.terminal import print_json, print_table, say


@dataclass(frozen=True)
class WhyOptions(JsonOption):
    """Tell a document's story: where it comes from, what each stage did to it, and why it was dropped if it was."""

    identity: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ID")]
    """Of the document: the name of its file, #, and its number in it, such as pages/a.warc.gz#12."""
    corpus: Annotated[str, tyro.conf.arg(name="in")]
    """Folder of the corpus."""


@command("data why", WhyOptions)
def why_command(options: WhyOptions) -> None:
    from napkin.curation.engine.document_story import find_story

    story = find_story(Path(options.corpus), options.identity)
    if options.json:
        print_json(story)
        return
    say(f"{story.identity}: {story.ending}")
    rows = [["source", f"{story.source}, byte {story.offset:,}"]]
    rows += [["address", story.address]] if story.address else []
    rows += [["licence", story.licence]] if story.licence else []
    rows += [["found", f"{name} = {value}"] for name, value in story.fields.items()]
    rows += [[entry.stage, entry.note or "went on"] for entry in story.trace]
    print_table([], rows)


@dataclass(frozen=True)
class SamplesOptions:
    """Write a page with samples of what each rule of each stage dropped, beside samples of what remained."""

    corpus: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CORPUS")]
    """Folder of the corpus."""
    out: str | None = None
    """The page; None is samples.html in the folder of the corpus."""


@command("data samples", SamplesOptions)
def samples_command(options: SamplesOptions) -> None:
    from napkin.curation.engine.document_story import write_sample_page

    corpus = Path(options.corpus)
    path = corpus / "samples.html" if options.out is None else Path(options.out)
    say(f"wrote {write_sample_page(corpus, path)}")
