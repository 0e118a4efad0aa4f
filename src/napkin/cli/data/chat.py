"""`napkin data chat`: conversations as tokens, some of which are learned: coloured on a terminal, and elsewhere between
marks."""

from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.text import Text

from napkin.chats.token_sequence import TokenSequence
from napkin.cli.common.files import folder_for, refuse_existing
from napkin.cli.common.options import JsonOption, Switch, command
from napkin.cli.common.progress import ProgressLine, progress_line
from napkin.cli.common.terminal import is_coloured, print_json, print_rich, print_table, say
from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer

if TYPE_CHECKING:
    from napkin.chats.chat_encoder import ChatEncoder, LeftOut
    from napkin.chats.token_sequence import TokenSequence
    from napkin.tuning.example_file import ExampleFile


LEARNED_BEGINS, LEARNED_ENDS = "{+", "+}"
_LEARNED, _NOT_LEARNED, _SPECIAL = "black on bright_green", "", "bold"


def learned_text(tokenizer: Tokenizer, sequence: TokenSequence) -> Text:
    """The text that a sequence's tokens stand for, as `readable_parts` has it."""
    from napkin.chats.chat_encoder import readable_parts

    text, coloured = Text(), is_coloured()
    for counts, stretch in groupby(readable_parts(tokenizer, sequence), key=lambda part: part[1]):
        style = _LEARNED if counts else _NOT_LEARNED
        text.append("" if coloured or not counts else LEARNED_BEGINS)
        for shown, _, is_special in stretch:
            # A line of the text is a line here.
            text.append(shown.replace("↵", "↵\n"), f"{style} {_SPECIAL}".strip() if is_special else style)
        text.append("" if coloured or not counts else LEARNED_ENDS)
    return text


MOST_SHOWN = 1000
NO_LIMIT = 2**34
"""Tokens of a conversation, where no model says how many it reads."""
_BETWEEN_LINES = 100
"""Conversations from one line of progress to the next."""


@dataclass(frozen=True)
class ChatDataOptions(JsonOption):
    """Turn conversations into tokens of which some are learned, as tuning does: count them, show them, or write them to
    a file that `napkin tune sft` reads."""

    chats: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHATS")]
    """JSON lines of conversations, each as messages, as prompt and completion, or as turns by speaker; or a file that
    this command has made."""
    start: str = ""
    """The model to tune, whose tokenizer and chat template are used: a run, or a Hugging Face folder."""
    tokenizer: str = ""
    """Instead of a model, the file of a tokenizer."""
    chat_template: str = ""
    """A file with the chat template, in jinja's language; "" is the model's own, or for one without it the built-in: a
    line per message that begins with its role."""
    learned: Literal["assistant", "last", "all"] = "assistant"
    """Choice of the tokens that count in the loss: all turns of the assistant, only its last turn, or all tokens."""
    max_length: int = 0
    """Longest conversation in tokens, longer ones are left out; 0 is the model's context length."""
    out: str = ""
    """File to write, such as chats.tokens."""
    show: Switch = False
    """Print conversations: what is learned is coloured, or without colours between {+ and +}."""
    first: int = 3
    """Number of conversations to show."""


@dataclass
class Counts:
    """Counts of conversations, of their tokens, and of the tokens that are trained on."""

    conversations: int = 0
    tokens: int = 0
    learned_tokens: int = 0
    longest: int = 0

    def add(self, sequence: "TokenSequence") -> None:
        """Count one."""
        self.conversations += 1
        self.tokens += len(sequence.tokens)
        self.learned_tokens += sequence.n_trained
        self.longest = max(self.longest, len(sequence.tokens))


@command("data chat", ChatDataOptions)
def main(options: ChatDataOptions) -> None:
    _check(options)
    from napkin.tuning.example_file import ExampleFile, is_example_file

    with progress_line("opening") as line:
        encoder, max_length = _encoder(options)
        if is_example_file(options.chats):
            if options.out:
                raise NapkinError(f"'{options.chats}' holds tokens already: name JSON lines to make tokens of")
            chats = ExampleFile.open(options.chats)
            chats.refuse_other_tokenizer(encoder.tokenizer)
            counts, left_out = _counts_of(chats), chats.left_out
            shown = [(number, chats[number - 1][0]) for number in range(1, 1 + min(options.first, len(chats)))]
        else:
            line.retitle("encoding the conversations")
            counts, left_out, shown = _encoded(options, encoder, max_length, line)
    if options.json:
        made = {"path": options.out} if options.out else {}
        print_json({**made, **vars(counts), "left_out": left_out.counts, "ends_answers": bool(encoder.end_ids)})
        return
    if options.show:
        if not is_coloured():
            say(f"learned tokens are between {LEARNED_BEGINS} and {LEARNED_ENDS}")
            say()
        what = "conversation" if is_example_file(options.chats) else "line"
        for number, sequence in shown:
            say(f"{what} {number:,}: {len(sequence.tokens):,} tokens, {sequence.n_trained:,} learned", style="dim")
            print_rich(learned_text(encoder.tokenizer, sequence))
            say()
    learned = counts.learned_tokens / counts.tokens if counts.tokens else 0.0
    figures = (counts.conversations, counts.tokens, counts.learned_tokens)
    row = [*(f"{figure:,}" for figure in figures), f"{learned:.1%}", f"{counts.longest:,}"]
    print_table(["conversations", "tokens", "learned", "of the tokens", "longest"], [row], align="rrrrr")
    for reason, n in left_out.counts.most_common():
        say(f"left out: {n:,} {reason}, the first in line {left_out.first_lines[reason]:,}")
    if not encoder.end_ids and encoder.train_on != "all":
        say("the chat template ends answers with text and not with a special token: a tuned model may not know the end")
    if options.out:
        say(f"wrote {options.out}, with {options.out}.mask and {options.out}.json beside it")


def _check(options: ChatDataOptions) -> None:
    if bool(options.start) == bool(options.tokenizer):
        raise NapkinError("name a model with --start, or a tokenizer with --tokenizer, and not both")
    if not 0 <= options.max_length <= NO_LIMIT:
        raise NapkinError(f"--max-length is {options.max_length}: use 1 to {NO_LIMIT}, or 0 for the model's")
    if not 1 <= options.first <= MOST_SHOWN:
        raise NapkinError(f"--first is {options.first}: use 1 to {MOST_SHOWN:,}")
    if options.out:
        for ending in ("", ".mask", ".json"):
            refuse_existing(Path(options.out + ending))


def _encoder(options: ChatDataOptions) -> tuple["ChatEncoder", int]:
    """The tokenizer, and how long a conversation may be."""
    from napkin.tuning.method import encoder_of_base, encoder_of_tokenizer

    if options.tokenizer:
        from napkin.tokenizer.tokenizer_file import load_tokenizer

        tokenizer = load_tokenizer(options.tokenizer)
        return encoder_of_tokenizer(tokenizer, options.chat_template, options.learned), options.max_length or NO_LIMIT
    from napkin.tuning.method import open_base

    start = open_base(options.start)
    encoder = encoder_of_base(start, options.chat_template, options.learned)
    return encoder, options.max_length or start.config.context_length


Encoded = tuple[Counts, "LeftOut", list[tuple[int, "TokenSequence"]]]
"""Counts, what was left out, and the first conversations by line."""


def _encoded(options: ChatDataOptions, encoder: "ChatEncoder", max_length: int, line: ProgressLine) -> Encoded:
    from napkin.chats.chat_encoder import LeftOut
    from napkin.chats.read_conversations import encoded_chats
    from napkin.tuning.example_file import nothing_to_train_on, write_example_file

    def encoded(left_out: LeftOut):
        return ((line, example[0]) for line, example in encoded_chats(options.chats, encoder, left_out, max_length))

    def progress(n: int) -> None:
        if n % _BETWEEN_LINES == 0:
            line(n, None, f"{n:,} conversations")

    left_out = LeftOut()
    if options.out:
        shown = list(islice(encoded(LeftOut()), options.first)) if options.show else []
        with folder_for(Path(options.out)):
            written = write_example_file(
                options.out, "conversations", options.chats, encoder, max_length=max_length, progress=progress
            )
        return _counts_of(written), written.left_out, shown
    counts, shown = Counts(), []
    for number, sequence in encoded(left_out):
        counts.add(sequence)
        progress(counts.conversations)
        if len(shown) < options.first:
            shown.append((number, sequence))
    if not counts.conversations:
        raise nothing_to_train_on(options.chats, "conversations", left_out)
    return counts, left_out, shown


def _counts_of(chats: "ExampleFile") -> Counts:
    about = chats.about
    return Counts(len(chats), about.tokens, about.learned_tokens, about.longest)
