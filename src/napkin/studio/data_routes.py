"""Routes of the data page: corpora, the flow of each, documents, and what other thresholds would drop."""

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from napkin.studio.corpora import documents, flow, story, text_of, thresholds, tried
from napkin.studio.named_paths import NamedPaths
from napkin.studio.requests import as_json, body_of


class CorpusRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A corpus."""

    corpus: str


class DocumentsRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The samples of a rule of a stage; stage -1 is what remained."""

    corpus: str
    stage: int
    rule: str = ""


class StoryRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A document of a corpus."""

    corpus: str
    identity: str


class StageRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A stage of a corpus."""

    corpus: str
    stage: int


class TryRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A stage with some of its options changed."""

    corpus: str
    stage: int
    options: dict[str, Any]


class TextRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A sampled document that entered a stage, and a rule whose passages are marked in it."""

    corpus: str
    stage: int
    identity: str
    rule: str = ""


async def _corpora(request: Request) -> Response:
    corpora: NamedPaths = request.app.state.corpora
    return as_json({"folder": str(corpora.folder), "corpora": [*await asyncio.to_thread(corpora.find)]})


async def _flow(request: Request) -> Response:
    asked = await body_of(request, CorpusRequest)
    return await _answer(request, asked.corpus, flow)


async def _documents(request: Request) -> Response:
    asked = await body_of(request, DocumentsRequest)
    return await _answer(request, asked.corpus, documents, asked.stage, asked.rule)


async def _story(request: Request) -> Response:
    asked = await body_of(request, StoryRequest)
    return await _answer(request, asked.corpus, story, asked.identity)


async def _thresholds(request: Request) -> Response:
    asked = await body_of(request, StageRequest)
    return await _answer(request, asked.corpus, thresholds, asked.stage)


async def _tried(request: Request) -> Response:
    asked = await body_of(request, TryRequest)
    return await _answer(request, asked.corpus, tried, asked.stage, asked.options)


async def _text(request: Request) -> Response:
    asked = await body_of(request, TextRequest)
    return await _answer(request, asked.corpus, text_of, asked.stage, asked.identity, asked.rule)


async def _answer(request: Request, corpus: str, function: Any, *arguments: Any) -> Response:
    def work() -> Any:
        return function(request.app.state.corpora.path_of(corpus), *arguments)

    return as_json(await asyncio.to_thread(work))


DATA_ROUTES = [
    Route("/api/data/corpora", _corpora),
    Route("/api/data/flow", _flow, methods=["POST"]),
    Route("/api/data/documents", _documents, methods=["POST"]),
    Route("/api/data/story", _story, methods=["POST"]),
    Route("/api/data/thresholds", _thresholds, methods=["POST"]),
    Route("/api/data/try", _tried, methods=["POST"]),
    Route("/api/data/text", _text, methods=["POST"]),
]
