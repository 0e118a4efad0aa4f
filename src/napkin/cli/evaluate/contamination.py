"""`napkin contamination`."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from napkin.cli.common.options import JsonOption, command
from napkin.cli.common.progress import ProgressLine, progress_line
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.errors import NapkinError
from napkin.units import format_bytes, format_share

if TYPE_CHECKING:
    from napkin.data.corpus import Document

_SHOWN = 20


@dataclass(frozen=True)
class ContaminationOptions(JsonOption):
    """Look for the items of a task in a training text, whatever its case, spaces, line breaks and punctuation; name
    those that stand in it, and say what score remains without them."""

    task: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TASK ...")] = ()
    """Files of a task, as for `napkin evaluate --task`."""
    texts: tuple[str, ...] = ()
    """The training text: files, folders, or stdlib: for Python's own library."""
    token_files: tuple[str, ...] = ()
    """Token files that a run was trained on, beside --texts or instead of them."""
    tokenizer: str | None = None
    """The tokenizer of the token files."""
    suffixes: tuple[str, ...] = ()
    """Endings of the files that are read in folders: --suffixes .txt .md; none is all files."""
    share: float = 0.6
    """An item is contaminated if this share of its windows of 32 letters stands together in a document."""
    result: str | None = None
    """A result that `napkin evaluate --task ... --out` wrote: its score without contaminated items is printed."""


@command("contamination", ContaminationOptions)
def main(options: ContaminationOptions) -> None:
    if not options.task:
        raise NapkinError("no TASK is given: name the files of a task")
    if not options.texts and not options.token_files:
        raise NapkinError("no text is given: name files, folders or stdlib: with --texts, or --token-files")
    if bool(options.token_files) != (options.tokenizer is not None):
        raise NapkinError("--token-files and --tokenizer belong together: give both")
    from napkin.cli.common.files import open_documents
    from napkin.evaluation.contamination import find_contamination
    from napkin.evaluation.tasks.results import read_result
    from napkin.evaluation.tasks.task_file import read_task

    task = read_task(options.task, skip_bad=True)
    result = None if options.result is None else read_result(Path(options.result))
    if result is not None:
        result.refuse_other_items(task.items)
    for message in task.left_out:
        notify(f"left out: {message}")
    with progress_line("reading") as line:
        texts = open_documents(options.texts, options.suffixes)
        documents = _counted(itertools.chain(texts, _of_token_files(options)), line)
        found = find_contamination(task.items, documents, share=options.share)
    scores = None if result is None else result.scores_without(found.contaminated)
    if options.json:
        clean = [item.name for item in task.items if item.name not in found.contaminated]
        print_json({"task": task.name, **found.as_values(), "clean": clean, "scores": scores})
        return
    stand, remain = len(found.found), found.items - len(found.found)
    say(
        f"{stand} of {found.items} items of {task.name} stand in {format_bytes(found.bytes)} of text "
        f"({format_share(stand / found.items)}); {remain} remain"
    )
    if found.found:
        rows = [[each.item, format_share(each.share), each.document] for each in found.found[:_SHOWN]]
        print_table(["item", "found", "in"], rows, align="lrl")
        if stand > _SHOWN:
            say(f"and {stand - _SHOWN} more, which --json lists")
    if found.too_short:
        say(f"{len(found.too_short)} are too short to tell, or of phrases that many items share; they count as clean")
    if scores is not None:
        rows = []
        for name, parts in scores.items():
            figures = (
                "–" if each is None else f"{each.mean:.4f} ± {each.standard_error:.4f}" for each in parts.values()
            )
            rows.append([name, *figures])
        say()
        print_table(["score", "all items", "without contaminated ones", "contaminated ones"], rows)


def _of_token_files(options: ContaminationOptions) -> "Iterator[Document]":
    from napkin.data.token_file import TokenFile
    from napkin.evaluation.contamination import documents_of_token_file
    from napkin.tokenizer.tokenizer_file import load_tokenizer

    if options.tokenizer is not None:
        tokenizer = load_tokenizer(options.tokenizer)
        for path in options.token_files:
            yield from documents_of_token_file(TokenFile.open(path), tokenizer)


def _counted(documents: "Iterator[Document]", line: ProgressLine) -> "Iterator[Document]":
    size = 0
    for document in documents:
        yield document
        size += len(document.data)
        line(size, None, format_bytes(size))
