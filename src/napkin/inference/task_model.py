"""A model that tasks are put to: scores by `score`, answers by the engine, many at a time."""

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch

from napkin.chats.chat_format import Message
from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.inference.engine import Engine
from napkin.inference.open_model import OpenModel, WeightFormat, open_model
from napkin.inference.request import Completion, Request
from napkin.inference.scoring import BRANCH_TOKENS, Score, score
from napkin.inference.settings import Sampling
from napkin.inference.text_stream import TextStream


class EvaluatedModel:
    """What `napkin.evaluation.tasks` asks of a model, by a run or a Hugging Face folder."""

    def __init__(self, opened: OpenModel, folder: StrPath) -> None:
        self._opened, self._folder = opened, str(folder)
        self.context_length = opened.model.config.context_length
        self.start_ids = opened.start_ids
        self.document_ids = opened.start_ids or opened.stop_ids[:1]

    @property
    def opened(self) -> OpenModel:
        """The model and its tokenizer."""
        return self._opened

    def encode(self, text: str) -> list[int]:
        """The ids of a text; special tokens in it are ordinary text."""
        return self._opened.tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """The ids of a conversation. Raises NapkinError where the model has no chat template."""
        if not self._opened.has_chat_template:
            raise NapkinError(f"'{self._folder}' has no chat template: leave out --chat")
        return self._opened.chat.encode([Message(role, content) for role, content in messages])

    def logprobs(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        """The log-probability of each continuation, in nats."""
        return [each.total for each in self.scores(pairs)]

    def scores(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """The scores of continuations; shared beginnings are computed once."""
        model = self._opened.model
        most = BRANCH_TOKENS
        if model.head_weight.device.type == "cpu":
            # Scores of all with all cost as much as the products of so many tokens.
            most = max(128, min(most, 2 * model.config.d_model))
        return score(model, pairs, branch_tokens=most)

    def complete(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Sequence[str]
    ) -> Iterator[tuple[int, str]]:
        """The likeliest tokens after each prompt, up to a stop text, as they end."""
        engine = self._engine
        sampling = Sampling(temperature=0.0)
        running = [
            (number, engine.submit(Request(tuple(prompt), max_tokens, sampling)), TextStream(self._tokenizer, stop))
            for number, prompt in enumerate(prompts)
        ]
        texts, read = [""] * len(prompts), [0] * len(prompts)
        while running:
            engine.step()
            for each in list(running):
                number, completion, stream = each
                for drawn in completion.draws[read[number] :]:
                    read[number] += 1
                    texts[number] += stream.push(drawn.token) if not stream.stopped else ""
                if completion.finish is not None or stream.stopped:
                    texts[number] += stream.finish()
                    self._forget(completion)
                    running.remove(each)
                    yield number, texts[number]

    def about(self) -> dict[str, Any]:
        """Name, folder, checksum of the weights, number format, tokenizer."""
        weight = self._opened.model.head_weight
        return {
            "name": self._opened.name,
            "weights_sha256": self._weights_sha256,
            "tokenizer": self._opened.tokenizer.fingerprint,
            "weights": str(weight.dtype).removeprefix("torch."),
            "device": weight.device.type,
            "parameters": sum(each.numel() for each in self._opened.model.parameters()),
        }

    @property
    def _tokenizer(self) -> Any:
        return self._opened.tokenizer

    @cached_property
    def _engine(self) -> Engine:
        return Engine(self._opened.model, stop_ids=self._opened.stop_ids)

    def _forget(self, completion: Completion) -> None:
        if completion.finish is None:
            self._engine.cancel(completion)

    @cached_property
    def _weights_sha256(self) -> str:
        digest = hashlib.sha256()
        for name, tensor in sorted(self._opened.model.state_dict().items()):
            if isinstance(tensor, torch.Tensor):
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def open_for_tasks(folder: StrPath, *, weights: WeightFormat = "fp32", **how: Any) -> EvaluatedModel:
    """Open a run or a Hugging Face folder; see `open_model`."""
    return EvaluatedModel(open_model(folder, weights=weights, **how), folder)
