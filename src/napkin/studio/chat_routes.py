"""Routes of the chat page: models, answers as they are generated, which part of a conversation would be trained on,
votes.

A prompt to one or two models is a round. Two models answer in a random order, and their names are told only when the
round is over: with a vote, or on request, after which no vote is possible. Votes are on the answers that the server
sent, not on texts that a page sends back.
"""

import asyncio
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from napkin.chats.chat_encoder import TrainOn, readable_parts
from napkin.chats.chat_format import Message
from napkin.chats.token_sequence import TokenSequence
from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.serving.answers import EventStream
from napkin.serving.application import chat_job, completion_job
from napkin.serving.completion_job import Piece
from napkin.serving.request_body import ApiError, ChatBody, CompletionBody, StreamOptions, read_body
from napkin.serving.tools import uses_tools
from napkin.studio.models import ModelShelf, OpenModel
from napkin.studio.requests import as_json, body_of, refuse_unless_allowed
from napkin.studio.votes import Ballot, Verdict, Votes

MOST_CHAT_BYTES = 8 * 2**20
MOST_ROUNDS = 64
"""Rounds that may still be voted on; each has its prompt and its answers."""
MOST_KEPT_BYTES = 64 * 2**20
"""The most bytes of prompts in all kept rounds."""
_SEEDS = 2**31
_SETTINGS = "temperature top_p top_k min_p repetition_penalty max_tokens seed".split()


@dataclass
class Side:
    """A model's answer in a round."""

    model: str
    text: str = ""
    finish: str | None = None
    is_begun: bool = False
    stamp: str = ""
    """The `stamp` of the model that answers: a run may have a newer checkpoint when the vote is given."""

    def add(self, piece: Piece) -> None:
        """Keep what was sent."""
        self.text += piece.text
        self.finish = piece.finish or self.finish

    @property
    def is_whole(self) -> bool:
        """True for an answer that ended on its own or at its limit."""
        return self.finish in ("stop", "length")


@dataclass
class Round:
    """A prompt, and one or two answers in the order in which they are shown."""

    body: ChatBody | CompletionBody
    sides: list[Side]
    size: int
    """Bytes of the request."""
    is_over: bool = False
    """True once the names were shown."""

    @property
    def asked(self) -> list[dict[str, str]] | str:
        """The messages, or the text to continue."""
        if isinstance(self.body, CompletionBody):
            assert isinstance(self.body.prompt, str)
            return self.body.prompt
        return [{"role": each.role, "content": each.text(place)} for place, each in enumerate(self.body.messages)]


@dataclass
class Rounds:
    """The newest rounds, by numbers that cannot be guessed."""

    _kept: OrderedDict[str, Round] = field(default_factory=OrderedDict)

    def add(self, new: Round) -> str:
        """Keep a round, forget the oldest ones, and return its number."""
        number = secrets.token_urlsafe(12)
        self._kept[number] = new
        while len(self._kept) > MOST_ROUNDS or sum(each.size for each in self._kept.values()) > MOST_KEPT_BYTES:
            self._kept.popitem(last=False)
        return number

    def find(self, number: str) -> Round:
        """The round of a number. Raises HTTPException for one that is not kept any more."""
        if number not in self._kept:
            raise HTTPException(404, "this round is not known any more: ask again")
        return self._kept[number]


class OpenRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The model to open."""

    name: str


class AskRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A prompt in OpenAI's form to one or two models: a conversation, or a text to continue."""

    models: list[str]
    chat: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()


class SideRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One answer of a round."""

    round: str
    side: int


class RoundRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The request for the models of a round."""

    round: str


class VoteRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A round, and which answer is better: the first is a."""

    round: str
    verdict: Verdict


class Said(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A message."""

    role: str
    content: str


class LearnedRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A conversation, and the model whose template writes it."""

    model: str
    messages: list[Said]
    learned: TrainOn = "assistant"


async def _models(request: Request) -> Response:
    shelf = _shelf(request)
    return as_json({"folder": str(shelf.folder), "models": await asyncio.to_thread(shelf.find)})


async def _open(request: Request) -> Response:
    asked = await body_of(request, OpenRequest)
    async with _shelf(request).using(asked.name) as model:
        return as_json(await asyncio.to_thread(model.about))


async def _ask(request: Request) -> Response:
    asked = await body_of(request, AskRequest, MOST_CHAT_BYTES)
    chat, text = bytes(asked.chat), bytes(asked.text)
    if bool(chat) == bool(text):
        raise HTTPException(400, "ask with a chat or with a text, one of them")
    if not 1 <= len(asked.models) <= 2 or len({*asked.models}) < len(asked.models):
        raise HTTPException(400, f"{len(asked.models)} models are named: name one, or two that differ")
    for name in asked.models:
        await asyncio.to_thread(_shelf(request).path_of, name)
    body = read_body(chat, ChatBody) if chat else read_body(text, CompletionBody)
    if body.n != 1 or (isinstance(body, CompletionBody) and not isinstance(body.prompt, str)):
        raise HTTPException(400, "a round has one prompt, and one answer from each model: use n 1 and one text")
    if isinstance(body, ChatBody) and uses_tools(body):
        raise HTTPException(400, "a round has no tools: leave out tools, and messages with tool_calls")
    body.seed = secrets.randbelow(_SEEDS) if body.seed is None else body.seed
    body.stream, body.stream_options = True, StreamOptions(include_usage=True)
    sides = [Side(name) for name in asked.models]
    secrets.SystemRandom().shuffle(sides)
    number = request.app.state.rounds.add(Round(body, sides, len(chat or text), is_over=len(sides) == 1))
    return as_json({"round": number, "sides": len(sides)})


async def _answer(request: Request) -> Response:
    asked = await body_of(request, SideRequest)
    round = request.app.state.rounds.find(asked.round)
    if not 0 <= asked.side < len(round.sides):
        raise HTTPException(400, f"side is {asked.side}: use 0 to {len(round.sides) - 1}")
    side, body = round.sides[asked.side], round.body
    if side.is_begun:
        raise HTTPException(409, "this answer was asked for before: ask again for another")
    side.is_begun = True
    async with _shelf(request).using(side.model) as model:
        submit = chat_job if isinstance(body, ChatBody) else completion_job
        job, form = await submit(model.service, body)  # pyright: ignore[reportArgumentType]
        side.stamp = model.stamp
    form.model = "ab"[asked.side]
    return EventStream(job, form, include_usage=True, on_piece=side.add)


async def _names(request: Request) -> Response:
    round = request.app.state.rounds.find((await body_of(request, RoundRequest)).round)
    round.is_over = True
    return as_json({"names": [side.model for side in round.sides]})


async def _vote(request: Request) -> Response:
    refuse_unless_allowed(request)
    asked = await body_of(request, VoteRequest)
    round = request.app.state.rounds.find(asked.round)
    if round.is_over:
        raise HTTPException(409, "the models of this round were shown already: vote before that")
    if not all(side.is_whole for side in round.sides):
        raise HTTPException(409, "an answer was not finished: a vote is between two whole ones")
    # From here on no other vote is accepted, however long this one takes.
    round.is_over = True
    try:
        about = [await _about(request, side) for side in round.sides]
        await asyncio.to_thread(request.app.state.votes.add, _ballot(round, asked.verdict, about))
    except NapkinError:
        round.is_over = False
        raise
    return as_json({"names": [side.model for side in round.sides]})


async def _about(request: Request, side: Side) -> dict[str, Any]:
    """The identity of the model that answered, with the checksum of its weights. Raises NapkinError if other weights
    have been opened since.
    """
    async with _shelf(request).using(side.model) as model:
        if model.stamp != side.stamp:
            raise NapkinError("a model has newer weights than those that answered: ask again, and vote on that")
        return {**await asyncio.to_thread(model.opened.about), "step": model.opened.step}


def _ballot(found: Round, verdict: Verdict, about: list[dict[str, Any]]) -> Ballot:
    first, second = found.sides
    return Ballot(
        found.asked,
        (first.model, second.model),
        (first.text, second.text),
        (str(first.finish), str(second.finish)),
        verdict,
        {name: getattr(found.body, name) for name in _SETTINGS},
        (about[0], about[1]),
    )


async def _ranking(request: Request) -> Response:
    ranking = await asyncio.to_thread(request.app.state.votes.ranking)
    return as_json({**ranking, "can_vote": request.app.state.allow_actions})


async def _learned(request: Request) -> Response:
    asked = await body_of(request, LearnedRequest, MOST_CHAT_BYTES)
    async with _shelf(request).using(asked.model) as model:
        return as_json(await asyncio.to_thread(_learned_of, model, asked))


def _learned_of(model: OpenModel, asked: LearnedRequest) -> dict[str, Any]:
    """The text that the template makes of a conversation, in parts, each trained on or not. Before the first answer it
    is the prompt, of which nothing is trained on. Raises NapkinError where the template refuses the messages.
    """
    encoder = model.encoder(asked.learned)
    messages = [Message(each.role, each.content) for each in asked.messages]
    if any(each.role == "assistant" for each in messages):
        sequence = encoder.sequence(messages)
    else:
        ids = np.array(encoder.prompt(messages), dtype=np.int64)
        sequence = TokenSequence(ids, np.zeros(len(ids), dtype=bool))
    return {
        "parts": [*readable_parts(encoder.tokenizer, sequence)],
        "tokens": len(sequence.tokens),
        "learned": sequence.n_trained,
        "template": encoder.template.source,
        "is_own": model.opened.has_chat_template,
        "ends_answers": bool(encoder.end_ids),
    }


def _shelf(request: Request) -> ModelShelf:
    return request.app.state.shelf


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return as_json({"error": str(error)}, error.status)


def prepare_chat(app: Starlette, folder: StrPath) -> None:
    """Give an application what these routes use: models, rounds, votes, and the form of their refusals."""
    app.state.shelf, app.state.rounds, app.state.votes = ModelShelf(folder), Rounds(), Votes(Path(folder))
    app.add_exception_handler(ApiError, _api_error)


CHAT_ROUTES = [
    Route("/api/chat/models", _models),
    Route("/api/chat/open", _open, methods=["POST"]),
    Route("/api/chat/ask", _ask, methods=["POST"]),
    Route("/api/chat/answer", _answer, methods=["POST"]),
    Route("/api/chat/names", _names, methods=["POST"]),
    Route("/api/chat/vote", _vote, methods=["POST"]),
    Route("/api/chat/votes", _ranking),
    Route("/api/chat/learned", _learned, methods=["POST"]),
]
