"""Conversations are encoded into a file of tokens with their mask; see `napkin.alignment.chats.chat_tokens`."""

from array import array
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from napkin.alignment.chats.chat_encoder import ChatEncoder
from napkin.alignment.chats.chat_tokens import ChatSidecar, ChatTokens, is_chat_tokens, mask_path
from napkin.alignment.chats.json_lines import in_line
from napkin.alignment.chats.left_out import LeftOut
from napkin.alignment.chats.read_conversations import Conversation, read_chats
from napkin.alignment.token_sequence import TokenSequence
from napkin.checkpoint.checksums import checksum_of
from napkin.data.sidecar import NUMPY_DTYPES, dtype_name, sidecar_path
from napkin.errors import CorruptFile, NapkinError
from napkin.files import StrPath, atomic_file, cache_folder
from napkin.inference.chat_format import UnstableTemplate
from napkin.inference.chat_template import RefusedConversation
from napkin.runs.json_file import format_json

_BATCH, _BATCH_CHARACTERS = 64, 2**20
OnProgress = Callable[[int], None]
"""Called with the number of conversations so far."""


def encoded_chats(
    path: StrPath, encoder: ChatEncoder, left_out: LeftOut, max_length: int
) -> Iterator[tuple[Conversation, TokenSequence]]:
    """The conversations of a file of JSON lines as tokens.

    Those that the template refuses, of which nothing is learned, or which are longer than `max_length` tokens are left
    out and counted. Raises NapkinError for a template that writes earlier turns otherwise, exceeds its limits or cannot
    be read, and for lines that are not conversations.
    """
    for batch in _batches(read_chats(path, left_out, needs_answer=encoder.learned != "all")):
        found = encoder.sequences([chat.messages for chat in batch])
        for chat, sequence in zip(batch, found, strict=True):
            if isinstance(sequence, UnstableTemplate):
                raise in_line(path, chat.line, f"cannot be learned from: {sequence}")
            if isinstance(sequence, RefusedConversation):
                left_out.add(chat.line, f"refused by the chat template ({sequence.reason})")
            elif isinstance(sequence, NapkinError):
                left_out.add(chat.line, "of which no token is learned")
            elif len(sequence.tokens) > max_length:
                left_out.add(chat.line, f"longer than {max_length:,} tokens")
            else:
                yield chat, sequence


def _batches(chats: Iterator[Conversation]) -> Iterator[list[Conversation]]:
    """Conversations that are rendered together: some, of not too many characters."""
    batch: list[Conversation] = []
    size = 0
    for chat in chats:
        batch.append(chat)
        size += sum(len(message.content) for message in chat.messages) * len(chat.messages)
        if len(batch) == _BATCH or size > _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def write_chat_tokens(
    path: StrPath,
    chats: StrPath,
    encoder: ChatEncoder,
    *,
    max_length: int,
    overwrite: bool = False,
    left_out: LeftOut | None = None,
    progress: OnProgress = lambda n: None,
) -> ChatTokens:
    """Encode a file of JSON lines into a new file at `path`, in memory of a conversation, and open it.

    What is left out is added to `left_out`. The same input gives the same bytes. Raises NapkinError if one of the three
    files exists, where nothing is left to learn from, and for what `encoded_chats` raises.
    """
    path, left_out = Path(path), LeftOut() if left_out is None else left_out
    # The inner files get their names first, so a sidecar never exists beside incomplete tokens.
    with (
        atomic_file(sidecar_path(path), overwrite=overwrite) as sidecar_file,
        atomic_file(mask_path(path), overwrite=overwrite) as mask_file,
        atomic_file(path, overwrite=overwrite) as file,
    ):
        writer = _Writer(file, mask_file, encoder)
        for _, sequence in encoded_chats(chats, encoder, left_out, max_length):
            writer.add(sequence)
            progress(writer.n_conversations)
        if not writer.n_conversations:
            raise nothing_to_learn(chats, left_out)
        sidecar_file.write(format_json(writer.finish(left_out, max_length)).encode())
    return ChatTokens.open(path)


def nothing_to_learn(chats: StrPath, left_out: LeftOut) -> NapkinError:
    """The error for a file of which no conversation is left."""
    why = f": {left_out.describe()}" if left_out.n else ""
    return NapkinError(f"'{chats}' has no conversation to learn from{why}: name a file that has some")


def chat_tokens_of(
    path: StrPath, encoder: ChatEncoder, *, max_length: int, progress: OnProgress = lambda n: None
) -> ChatTokens:
    """The conversations of a file of tokens, or of JSON lines, which are encoded once and kept in the cache.

    Raises NapkinError for tokens of another tokenizer, template or choice of what is learned, and for what
    `write_chat_tokens` raises.
    """
    if is_chat_tokens(path):
        return _opened(path, encoder, max_length)
    if not Path(path).is_file():
        raise NapkinError(
            f"there is no file '{path}': name JSON lines of conversations, or what `napkin data chat` made"
        )
    key = sha256(f"{checksum_of(Path(path))} {encoder.fingerprint} {max_length}".encode()).hexdigest()
    kept = cache_folder() / "chats" / f"{key[:32]}.tokens"
    if is_chat_tokens(kept):
        try:
            return ChatTokens.open(kept)
        except CorruptFile:
            # It is made again, as it was.
            pass
    kept.parent.mkdir(parents=True, exist_ok=True)
    return write_chat_tokens(kept, path, encoder, max_length=max_length, overwrite=True, progress=progress)


def _opened(path: StrPath, encoder: ChatEncoder, max_length: int) -> ChatTokens:
    chats = ChatTokens.open(path)
    chats.refuse_other_tokenizer(encoder.tokenizer)
    if chats.about.encoder != encoder.fingerprint:
        raise NapkinError(
            f"'{path}' was made with another chat template or another --learned than this model is tuned with: make it "
            "again with `napkin data chat`"
        )
    if chats.about.max_length > max_length:
        raise NapkinError(
            f"'{path}' has conversations of up to {chats.about.max_length:,} tokens, {max_length:,} are allowed here: "
            f"make it again with --max-length {max_length}"
        )
    return chats


class _Writer:
    def __init__(self, file: BinaryIO, mask_file: BinaryIO, encoder: ChatEncoder) -> None:
        self._file, self._mask_file, self._encoder = file, mask_file, encoder
        self._dtype: Literal["uint16", "uint32"] = dtype_name(encoder.tokenizer.vocab_size)
        self._checksum, self._mask_checksum = sha256(), sha256()
        self._ends = array("q")
        self._bits = np.empty(0, bool)
        self.n_conversations = self.n_tokens = self.n_learned = 0

    def add(self, sequence: TokenSequence) -> None:
        """Write a conversation."""
        data = sequence.tokens.astype(NUMPY_DTYPES[self._dtype]).tobytes()
        self._file.write(data)
        self._checksum.update(data)
        self.n_conversations += 1
        self.n_tokens += len(sequence.tokens)
        self.n_learned += sequence.n_counted
        self._ends.append(self.n_tokens)
        self._add_bits(sequence.counts)

    def finish(self, left_out: LeftOut, max_length: int) -> ChatSidecar:
        """Write the rest of the mask; the sidecar."""
        self._add_bits(np.zeros(-self.n_tokens % 64, bool))
        self._write_mask(np.array(self._ends, "<i8").tobytes())
        return ChatSidecar(
            format="napkin-chat-tokens",
            version=1,
            dtype=self._dtype,
            conversations=self.n_conversations,
            tokens=self.n_tokens,
            learned_tokens=self.n_learned,
            vocab_size=self._encoder.tokenizer.vocab_size,
            tokenizer=self._encoder.tokenizer.fingerprint,
            encoder=self._encoder.fingerprint,
            max_length=max_length,
            left_out=dict(left_out.counts),
            sha256=self._checksum.hexdigest(),
            mask_sha256=self._mask_checksum.hexdigest(),
        )

    def _add_bits(self, counts: np.ndarray) -> None:
        bits = np.concatenate([self._bits, counts])
        whole = len(bits) // 8 * 8
        self._write_mask(np.packbits(bits[:whole]).tobytes())
        self._bits = bits[whole:]

    def _write_mask(self, data: bytes) -> None:
        self._mask_file.write(data)
        self._mask_checksum.update(data)
