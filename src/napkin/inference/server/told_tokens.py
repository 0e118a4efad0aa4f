"""The text of one completion as it grows, with the tokens that belong to each piece of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from napkin.inference.sampling import Draw
from napkin.inference.server.request_body import finite
from napkin.inference.text_stream import TextStream
from napkin.tokenizer.base import Tokenizer


@dataclass(frozen=True)
class ToldToken:
    """A token of a text: what was drawn, and the place of its first character in the text."""

    draw: Draw
    offset: int


class GrowingText:
    """Pieces of text as tokens come; they end before a stop text, and hold whole characters only.

    A token is told with the piece that holds its first character, so that the tokens of all pieces are those of the
    whole text. Tokens within the stop text are not told.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], *, offset: int = 0, at_start: bool = False) -> None:
        self.stopped = False
        self.length = offset
        """Characters released so far, those before the completion included."""
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, stop, at_start=at_start)
        # A second stream without stop texts knows at which character a token begins while its text is held back.
        self._plain = TextStream(tokenizer, at_start=at_start) if stop else None
        self._seen = offset
        self._waiting: list[ToldToken] = []

    def push(self, draw: Draw) -> tuple[str, list[ToldToken]]:
        """The text that is certain after one more token, and the tokens that begin in it."""
        self._waiting.append(ToldToken(draw, self._seen))
        if draw.token >= self._tokenizer.vocab_size:
            # The model's vocabulary may be padded: such an id has no text.
            return "", []
        piece = self._stream.push(draw.token)
        self._seen += len(piece if self._plain is None else self._plain.push(draw.token))
        self.stopped = self._stream.stopped
        return self._released(piece)

    def finish(self) -> tuple[str, list[ToldToken]]:
        """The rest, where no more tokens come."""
        piece, tokens = self._released(self._stream.finish())
        self.stopped = self._stream.stopped
        if not self.stopped:
            tokens, self._waiting = [*tokens, *self._waiting], []
        return piece, tokens

    def _released(self, piece: str) -> tuple[str, list[ToldToken]]:
        self.length += len(piece)
        n_told = sum(each.offset < self.length for each in self._waiting)
        told, self._waiting = self._waiting[:n_told], self._waiting[n_told:]
        return piece, told


def told_prompt(draws: Sequence[Draw], tokenizer: Tokenizer) -> list[ToldToken]:
    """The tokens of a prompt, each with its place in the prompt's text."""
    stream, offset, told = TextStream(tokenizer, at_start=True), 0, []
    for draw in draws:
        told.append(ToldToken(draw, offset))
        if draw.token < tokenizer.vocab_size:
            offset += len(stream.push(draw.token))
    return told


def token_text(token: int, tokenizer: Tokenizer) -> str:
    r"""A token's text; one that is a part of a character is written as its bytes: `bytes:\xf0\x9f`."""
    content = token_bytes(token, tokenizer)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def token_bytes(token: int, tokenizer: Tokenizer) -> bytes:
    """A token's bytes; none for an id that only fills up the model's vocabulary."""
    return tokenizer.vocabulary[token] if token < tokenizer.vocab_size else b""


def completion_logprobs(tokens: Sequence[ToldToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """As `/v1/completions` has them: four lists with an entry per token; the likeliest ones by their text."""
    return {
        "tokens": [token_text(each.draw.token, tokenizer) for each in tokens],
        "token_logprobs": [None if each.draw.logprob is None else finite(each.draw.logprob) for each in tokens],
        "top_logprobs": [None if each.draw.logprob is None else _likeliest(each.draw, tokenizer) for each in tokens],
        "text_offset": [each.offset for each in tokens],
    }


def _likeliest(draw: Draw, tokenizer: Tokenizer) -> dict[str, float]:
    """By their texts, and the drawn one if it is not among them."""
    found: dict[str, float] = {}
    for token, logprob in (*draw.top, (draw.token, draw.logprob or 0.0)):
        # Ids that fill up the vocabulary have the same text.
        found.setdefault(token_text(token, tokenizer), finite(logprob))
    return found


def chat_logprobs(tokens: Sequence[ToldToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """As `/v1/chat/completions` has them: an object per token, with the likeliest ones."""

    def described(token: int, logprob: float | None) -> dict[str, Any]:
        content = token_bytes(token, tokenizer)
        text = content.decode(errors="replace")
        return {"token": text, "logprob": None if logprob is None else finite(logprob), "bytes": list(content)}

    return {
        "content": [
            described(each.draw.token, each.draw.logprob)
            | {"top_logprobs": [described(token, logprob) for token, logprob in each.draw.top]}
            for each in tokens
        ],
        "refusal": None,
    }
