"""`napkin notes check FILE.md`: a linter of figures."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro

from napkin.cli.common.options import JsonOption, Switch, command
from napkin.cli.common.terminal import print_json, print_table, say
from napkin.errors import NapkinError
from napkin.files import read_bounded

MOST_BYTES = 2**24


@dataclass(frozen=True)
class NotesOptions(JsonOption):
    """Find the figures that a text states, and compare each with what it should be: FLOPs and days of training, bytes
    of weights, parameters of published models, datasheets of accelerators, bits and ranges of number formats, and
    arithmetic. A figure may be rounded to its last digit, behind "about" by a tenth. The exit status is 1 if one is
    wrong. Few sentences are understood: what is not listed as right was not checked."""

    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.md")]
    """Markdown or plain text."""
    all: Switch = False
    """Print what is right too, and the sentences with quantities that were not understood."""


@command("notes check", NotesOptions)
def main(options: NotesOptions) -> int:
    from napkin.planning.statements import check_statements

    try:
        text = read_bounded(options.file, MOST_BYTES, what="notes").decode()
    except UnicodeDecodeError as error:
        raise NapkinError(f"'{options.file}' is not UTF-8 at byte {error.start:,}: save it as UTF-8 text") from None
    statements = check_statements(text)
    counts = Counter(each.verdict for each in statements)
    if options.json:
        print_json([asdict(each) for each in statements])
        return int(counts["wrong"] > 0)
    shown = statements if options.all else [each for each in statements if each.verdict == "wrong"]
    rows = [
        (f"{each.line}", each.verdict, each.stated or "–", each.computed or "–", each.by or _shortened(each.sentence))
        for each in shown
    ]
    if rows:
        print_table(("line", "", "stated", "computed", "by"), rows, align="rllll")
    say(f"{counts['right']} right, {counts['wrong']} wrong; {counts['not understood']} sentences not understood")
    return int(counts["wrong"] > 0)


def _shortened(sentence: str, most: int = 60) -> str:
    return sentence if len(sentence) <= most else f"{sentence[: most - 1]}…"
