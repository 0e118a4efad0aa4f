"""Text out of tokens as they come: whole characters only, and never a part of a stop text."""

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence

from napkin.inference.sampling import Draw
from napkin.tokenizer.base import Tokenizer


def stream_text(
    draws: Iterable[Draw],
    tokenizer: Tokenizer,
    stop: Sequence[str] = (),
    *,
    at_start: bool = False,
    on_draw: Callable[[Draw], object] = lambda drawn: None,
) -> Iterator[str]:
    """Yield the text of drawn tokens as they come, up to a stop text; `on_draw` is called with each token.

    `at_start` is that of `TextStream`.
    """
    text = TextStream(tokenizer, stop, at_start=at_start)
    for drawn in draws:
        on_draw(drawn)
        if piece := text.push(drawn.token):
            yield piece
        if text.stopped:
            return
    if piece := text.finish():
        yield piece


class TextStream:
    """Turns tokens into text piece by piece; the pieces together are the text of their bytes.

    Tokens continue a text unless they are `at_start`: then the space is left out that some tokenizers put before one.

    A token may end within a character: its bytes wait for the rest. What may become a stop text waits until it has or
    cannot any more; where one is found, the text ends before it, and `stopped` is True.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, at_start: bool = False) -> None:
        self.stopped = False
        self._leaves_out_space = at_start and tokenizer.strips_space
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def push(self, token: int) -> str:
        """The text that is certain after one more token; it may be empty."""
        content = self._tokenizer.decode_bytes([token])
        if self._leaves_out_space and content:
            self._leaves_out_space, content = False, content.removeprefix(b" ")
        return self._released(self._decoder.decode(content))

    def finish(self) -> str:
        """The rest, where no more tokens come; a part of a character becomes U+FFFD."""
        text = self._released(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return text + rest

    def _released(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        ends = [place for each in self._stop if (place := text.find(each)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        kept = max((_overlap(text, each) for each in self._stop), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text with which a stop text begins."""
    return next(length for length in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:length]))
