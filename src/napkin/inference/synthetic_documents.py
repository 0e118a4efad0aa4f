"""The stages `rephrase` and `conversations`: a local model rewrites documents, or turns them into questions and answers
(WRAP: Maini et al. 2024, "Rephrasing the Web").

A document is divided into passages, each of which is a prompt of its own: the passages of one document are computed
together, in a KV cache of their own, and each has its own seed, a hash of seed, identity and place. So the output
depends on document, model and options alone, and not on other documents, shards or processes.

Provenance is a field of each document: the source's SHA-256, those of the model's weights and of the prompt, how tokens
were drawn, and how many.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from napkin.curation.stage import Dropped, Record, TraceEntry
from napkin.errors import NapkinError

if TYPE_CHECKING:
    from napkin.inference.loaded_model import LoadedModel

Style = Literal["easy", "medium", "hard", "question-answer"]
PROMPTS: dict[str, str] = {
    "easy": "Rewrite the text below in short sentences and simple words that a child understands. Keep its facts, add "
    "none, and write nothing else.",
    "medium": "Rewrite the text below in clear, correct English, as a good encyclopedia would say it. Keep its facts, "
    "add none, and write nothing else.",
    "hard": "Rewrite the text below tersely, in the precise and rare words of a scholar. Keep its facts, add none, and "
    "write nothing else.",
    "question-answer": "Turn the text below into questions and their answers, each on lines that begin with Question: "
    "and Answer:. Keep its facts, add none, and write nothing else.",
}
"""The instruction of each style, before the passage."""
ASK = "Write one question that the text below answers. Write the question alone."
ANSWER = "Answer the question by the text, in full sentences. Write the answer alone."
_HASHES, _SHINGLE_WORDS = 256, 5


@dataclass(frozen=True)
class _ByModel:
    """The options of both stages."""

    reads: ClassVar[tuple[str, ...]] = ("model",)
    planned_on: ClassVar[int] = 16
    """Documents of a sample that a plan runs the stage on."""

    model: str
    """The model that writes: a run, a Hugging Face folder, or a GGUF file."""
    passage_characters: int = 1200
    """Longest passage that the model is given at a time; 1,200 characters are about 300 tokens."""
    max_tokens: int = 512
    """Longest text that is drawn for a passage; one that does not end by then is dropped."""
    temperature: float = 0.7
    """Temperature of sampling; 0 takes the likeliest token."""
    top_p: float = 0.95
    """Draw among the likeliest tokens that together reach this probability."""
    seed: int = 0
    """Another seed draws other texts."""
    max_similarity: float = 0.8
    """Drop a text that is a copy of its passage: one whose Jaccard similarity of 5-word shingles, by MinHash, is at
    least this; 1 drops only equal words."""

    def __post_init__(self) -> None:
        from napkin.inference.settings import Sampling

        Sampling(temperature=self.temperature, top_p=self.top_p, seed=self.seed)
        for option, least, most in (("passage_characters", 1, 2**20), ("max_tokens", 1, 2**20)):
            if not least <= getattr(self, option) <= most:
                raise NapkinError(f"{option} is {getattr(self, option):,}: use {least:,} to {most:,}")
        if not 0 < self.max_similarity <= 1:
            raise NapkinError(f"max_similarity is {self.max_similarity:g}: use a number above 0, up to 1")

    def _provenance(self, record: Record, prompts: Sequence[str], tally: "_Tally") -> dict[str, Any]:
        """The provenance that is stored with a document: its source, and the model, prompt, settings and tokens of its
        new text."""
        return {
            "source_sha256": hashlib.sha256(record.text.encode("utf-8", "surrogatepass")).hexdigest(),
            "model": self.model,
            "model_sha256": _opened(self.model).fingerprint,
            "prompt_sha256": hashlib.sha256("\0".join(prompts).encode()).hexdigest(),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "passages": tally.passages,
            "left_out": dict(sorted(tally.left_out.items())),
            "prompt_tokens": tally.prompt_tokens,
            "tokens": tally.tokens,
        }


@dataclass(frozen=True)
class Rephrase(_ByModel):
    """Have a local model write each document anew, passage by passage, in a style (WRAP).

    Passages that the model leaves empty, copies, does not end, or writes too short or too long are left out; a document
    of which none remains is dropped.
    """

    name: ClassVar[str] = "rephrase"

    style: Style = "medium"
    """Style of the new text: easy, medium or hard words, or questions and answers."""
    prompt: str = ""
    """An instruction that replaces the style's."""
    least: float = 0.2
    """Characters of a new passage, as a share of the old one's, at least."""
    most: float = 3.0
    """Characters of a new passage, as a share of the old one's, at most."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.least <= self.most < float("inf"):
            raise NapkinError(f"least is {self.least:g} and most {self.most:g}: use 0 or more, most not below least")

    def apply(self, record: Record) -> Record | Dropped:
        tally = _Tally()
        instruction = self.prompt or PROMPTS[self.style]
        passages = passages_of(record.text, self.passage_characters)
        asked = [
            (f"{instruction}\n\n{passage}", _seed(self.seed, record.identity, n)) for n, passage in enumerate(passages)
        ]
        texts: list[str] = []
        for passage, found in zip(passages, _written(self, asked, tally), strict=True):
            rule = (
                found.rule
                or self._length_rule(passage, found.text)
                or _copied(passage, found.text, self.max_similarity)
            )
            if rule:
                tally.left_out[rule] += 1
            else:
                texts.append(found.text)
        tally.passages = len(texts)
        if not texts:
            return tally.dropped()
        provenance = self._provenance(record, [instruction], tally)
        return _noted(record, "\n\n".join(texts), self.name, {"style": "" if self.prompt else self.style, **provenance})

    def _length_rule(self, passage: str, text: str) -> str:
        share = len(text) / len(passage)
        return "too short" if share < self.least else "too long" if share > self.most else ""


@dataclass(frozen=True)
class Conversations(_ByModel):
    """Have a local model ask a question about each passage of a document and answer it by the passage: a document
    becomes a conversation.

    The field `messages` is the conversation, the text its plain lines. Passages whose question or answer is empty, not
    ended, or copied from the passage, or whose question is none, are left out; a document of which none remains is
    dropped.
    """

    name: ClassVar[str] = "conversations"

    with_passage: bool = True
    """Whether the user says the passage before the question; without it the model's answer is from memory."""

    def apply(self, record: Record) -> Record | Dropped:
        tally = _Tally()
        passages = passages_of(record.text, self.passage_characters)
        asked = [
            (f"{ASK}\n\n{passage}", _seed(self.seed, record.identity, 2 * n)) for n, passage in enumerate(passages)
        ]
        questions: list[tuple[int, str]] = []
        for number, found in enumerate(_written(self, asked, tally)):
            rule = found.rule or ("" if found.text.endswith("?") else "no question")
            if rule:
                tally.left_out[rule] += 1
            else:
                questions.append((number, found.text))
        asked = [
            (f"{ANSWER}\n\n{passages[n]}\n\n{question}", _seed(self.seed, record.identity, 2 * n + 1))
            for n, question in questions
        ]
        messages: list[dict[str, str]] = []
        for (number, question), found in zip(questions, _written(self, asked, tally), strict=True):
            rule = found.rule or _copied(passages[number], found.text, self.max_similarity)
            if rule:
                tally.left_out[rule] += 1
                continue
            said = f"{passages[number]}\n\n{question}" if self.with_passage else question
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": found.text}]
        tally.passages = len(messages) // 2
        if not messages:
            return tally.dropped()
        provenance = self._provenance(record, [ASK, ANSWER], tally)
        text = "".join(f"{each['role']}: {each['content']}\n" for each in messages)
        record = _noted(record, text, self.name, provenance)
        record.fields["messages"] = messages
        return record


class Written(NamedTuple):
    """A text of the model; `rule` says why it is of no use, and is empty where it is."""

    text: str
    rule: str


class _Tally:
    """Tokens that a document took, and its passages left out, by rule."""

    def __init__(self) -> None:
        self.passages = self.prompt_tokens = self.tokens = 0
        self.left_out: Counter[str] = Counter()

    def dropped(self) -> Dropped:
        """The rule that left out most passages."""
        if not self.left_out:
            return Dropped("no text")
        rule, n = max(sorted(self.left_out.items()), key=lambda each: each[1])
        return Dropped(rule, f"{n} of {self.left_out.total()} passages; {self.tokens} tokens")


def passages_of(text: str, characters: int) -> list[str]:
    """Divide a text into passages of at most so many characters: whole paragraphs together, longer ones at the ends of
    sentences, longer sentences between words or anywhere.

    >>> passages_of("One. Two.\\n\\nThree is long.", 12)
    ['One. Two.', 'Three is', 'long.']
    """
    passages: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        pieces = [paragraph.strip()]
        for boundary in (r"(?<=[.!?])\s+", r"\s+", r"(?<=.)(?=.)"):
            if max(map(len, pieces)) > characters:
                joint = "" if boundary.endswith("(?=.)") else " "
                pieces = [
                    part
                    for piece in pieces
                    for part in (
                        _joined(re.split(boundary, piece), characters, joint) if len(piece) > characters else [piece]
                    )
                ]
        passages += [piece for piece in pieces if piece]
    return _joined(passages, characters, "\n\n")


def _joined(pieces: Sequence[str], characters: int, joint: str) -> list[str]:
    """Join neighbours as long as they fit."""
    joined: list[str] = []
    for piece in pieces:
        if joined and len(joined[-1]) + len(joint) + len(piece) <= characters:
            joined[-1] += joint + piece
        else:
            joined.append(piece)
    return joined


def _written(stage: _ByModel, asked: Sequence[tuple[str, int]], tally: _Tally) -> list[Written]:
    """The model's answers to prompts, each with its seed, drawn together by an engine that has seen no others."""
    from napkin.chats.chat_format import Message
    from napkin.inference.requests import Request
    from napkin.inference.settings import Sampling

    if not asked:
        return []
    opened = _opened(stage.model)
    prompts = [opened.chat_format.encode([Message("user", text)]) for text, _ in asked]
    context = opened.context_length
    longest = max(map(len, prompts)) + stage.max_tokens
    engine = opened.engine(stop_ids=opened.stop_ids, longest=min(longest, context))
    completions = []
    for prompt, (_, seed) in zip(prompts, asked, strict=True):
        most = min(stage.max_tokens, context - len(prompt))
        sampling = Sampling(temperature=stage.temperature, top_p=stage.top_p, seed=seed)
        completions.append(None if most < 1 else engine.submit(Request(prompt, most, sampling)))
    while engine.has_work:
        engine.step()
    written: list[Written] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        if completion is None:
            written.append(Written("", "longer than the context"))
            continue
        tally.prompt_tokens += len(prompt)
        tally.tokens += len(completion.draws) + (completion.stop_draw is not None)
        text = opened.tokenizer.decode(completion.tokens)
        ends = [at for stop in opened.chat_format.stop if (at := text.find(stop)) >= 0]
        is_ended = completion.finish == "stop" or bool(ends)
        text = text[: min(ends, default=len(text))].strip()
        failed = "failed" if completion.finish == "failed" else ""
        written.append(Written(text, failed or ("" if is_ended else "not finished") or ("" if text else "empty")))
    return written


def _copied(passage: str, text: str, most: float) -> str:
    from napkin.curation.deduplication.minhash import MinHash, estimated_similarity

    signatures, words = MinHash(_HASHES, _SHINGLE_WORDS).signatures([passage, text])
    return "copied" if words.all() and float(estimated_similarity(signatures[:1], signatures[1:])[0]) >= most else ""


def _noted(record: Record, text: str, name: str, provenance: dict[str, Any]) -> Record:
    record.text = text
    record.fields[name] = provenance
    n, left_out = provenance["passages"], sum(provenance["left_out"].values())
    record.trace.append(TraceEntry(name, f"{n} of {n + left_out} passages, {provenance['tokens']} tokens"))
    return record


def _seed(seed: int, identity: str, place: int) -> int:
    digest = hashlib.blake2b(f"{seed} {place} {identity}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


@lru_cache(maxsize=1)
def _opened(name: str) -> "LoadedModel":
    from napkin.inference.loaded_model import load

    return load(name)
