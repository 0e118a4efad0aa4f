"""A model for lm-evaluation-harness: its tasks, napkin's scores.

`lm_eval` is an extra, imported when a model is made. The harness builds its
prompts and divides texts into context and continuation; log-probabilities are those of `score`, which computes shared
beginnings once, and answers are those of the engine.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.inference.loaded_model import LoadedModel, WeightFormat, load

REQUESTS_AT_A_TIME = 1024
"""Requests per batch, in the order of their tokens, so that beginnings are shared; progress is shown between
batches."""
ANSWER_TOKENS = 256
"""Most tokens of a generated answer, where a task does not say."""


def harness_model(folder: StrPath, *, weights: WeightFormat = "fp32") -> Any:
    """An `lm_eval.api.model.LM` of a run or a Hugging Face folder, for `lm_eval.simple_evaluate(model=...)`.

    Raises NapkinError where lm_eval is not installed.
    """
    return harness_class()(load(folder, weights=weights))


@cache
def harness_class() -> Any:
    """The subclass of `lm_eval.api.model.TemplateLM`, made of a `LoadedModel`."""
    try:
        from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise NapkinError(f"lm-evaluation-harness cannot be imported ({error}): pip install lm_eval") from None
    return type("NapkinLM", (HarnessMethods, TemplateLM), {})


class HarnessMethods:
    """The methods that the harness calls on a model, under its names."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__()
        if not model.document_ids:
            raise NapkinError("the model has no token that stands before a text: the first token has no probability")
        self._model = model

    @property
    def eot_token_id(self) -> int:
        """The token that stands for an empty context."""
        return self._model.document_ids[0]

    @property
    def max_length(self) -> int:
        """Length of the model's context in tokens."""
        return self._model.context_length

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text, after what stands before every text unless `add_special_tokens` is False."""
        start = [] if add_special_tokens is False else self._model.start_ids
        return [*start, *self._model.encode(string)]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether the model would give it at temperature 0."""
        from tqdm import tqdm  # pyright: ignore[reportMissingModuleSource]

        order = sorted(range(len(requests)), key=lambda number: [*requests[number][1], *requests[number][2]])
        scores: dict[int, tuple[float, bool]] = {}
        for start in tqdm(range(0, len(order), REQUESTS_AT_A_TIME), disable=disable_tqdm):
            numbers = order[start : start + REQUESTS_AT_A_TIME]
            pairs = [(requests[number][1], requests[number][2]) for number in numbers]
            for number, each in zip(numbers, self._model.score(pairs), strict=True):
                scores[number] = (each.total, each.greedy)
        return [scores[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in the harness's windows: each token once, as much context as fits."""
        from lm_eval import utils  # pyright: ignore[reportMissingImports]

        totals = []
        for request in requests:
            windows = utils.get_rolling_token_windows(
                token_list=self._model.encode(request.args[0]),
                prefix_token=self.eot_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [(None, *utils.make_disjoint_window(window)) for window in windows]
            totals.append(sum(total for total, _ in self._loglikelihood_tokens(pairs, disable_tqdm=True)))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The likeliest continuations, up to a stop text. Raises NapkinError where a task draws at a temperature."""
        from tqdm import tqdm  # pyright: ignore[reportMissingModuleSource]

        texts = [""] * len(requests)
        groups: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(_how(request.args[1]), []).append(number)
        with tqdm(total=len(requests), disable=disable_tqdm) as bar:
            for (max_new_tokens, stop), numbers in groups.items():
                if max_new_tokens >= self.max_length:
                    raise NapkinError(
                        f"an answer of up to {max_new_tokens} tokens leaves no room for a prompt in a context of "
                        f"{self.max_length}: use --gen_kwargs max_gen_toks=..."
                    )
                room = self.max_length - max_new_tokens
                prompts = [self.tok_encode(requests[number].args[0])[-room:] for number in numbers]
                for place, text in self._model.complete(prompts, max_new_tokens, stop):
                    texts[numbers[place]] = text
                    bar.update()
        return texts


def _how(settings: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Tokens at most and stop texts of the harness's settings of generation."""
    if settings.get("do_sample") and settings.get("temperature", 1.0):
        raise NapkinError("the task draws at a temperature: answers here are the likeliest ones, set do_sample=False")
    until = settings.get("until") or []
    stop = [until] if isinstance(until, str) else until
    return int(settings.get("max_gen_toks", ANSWER_TOKENS)), tuple(text for text in stop if text)
