"""Settings of sampling, also as generation_config.json of a Hugging Face folder has them.

Does not import torch: the command line reads the classes for its help.
"""

import math
from array import array
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from napkin.errors import CorruptFile, NapkinError
from napkin.files import StrPath
from napkin.model.huggingface.folder_files import read_json

LARGEST_SEED = 2**62
MOST_PROPOSED = 16
"""Tokens proposed for one pass, at most: of more, few are accepted."""
MOST_TOP_LOGPROBS = 1000
"""The most alternatives per token; each is kept for every token."""
MOST_TOP_K = 2**31 - 1
MOST_BIAS = 100.0
"""The bound of OpenAI's interface; e**100 takes a token as far as probabilities go."""
MOST_PENALTY = 100.0
"""A factor beyond which, either way, logits leave the range of their number format."""


@dataclass(frozen=True)
class Sampling:
    """Settings for drawing tokens; the same settings and seed draw the same tokens."""

    temperature: float = 0.8
    """Logits are divided by it: below 1, likely tokens become likelier; 0 always takes the likeliest token."""

    top_k: int | None = None
    """Draw among this many likeliest tokens (Fan et al. 2018); None is all."""

    top_p: float = 0.95
    """Draw among the likeliest tokens that together reach this probability (Holtzman et al. 2020), of those that top_k
    leaves; 1 is all."""

    min_p: float = 0.0
    """Leave out tokens less likely than this times the likeliest one (Nguyen et al. 2024); 0 is none."""

    repetition_penalty: float = 1.0
    """Logits of tokens that occurred, in the prompt or since, are divided by it if positive, else multiplied (Keskar et
    al. 2019); 1 changes nothing, 0.01 to 100."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and a number added to its logit, -100 to 100."""

    stop: tuple[str, ...] = ()
    """Texts before which a completion ends."""

    stop_ids: tuple[int, ...] = ()
    """Token ids before which a completion ends."""

    logprobs: int | None = None
    """Number of likeliest tokens to return at each position, with their log-probabilities before any of these settings;
    0 returns only the drawn token's, None nothing. `napkin generate` prints them with --json."""

    seed: int = 0
    """Seed of the draws; each of several completions uses the next seed."""

    def __post_init__(self) -> None:
        # Comparisons that NaN fails.
        penalty_fits = 1 / MOST_PENALTY <= self.repetition_penalty <= MOST_PENALTY
        logprobs_fit = self.logprobs is None or 0 <= self.logprobs <= MOST_TOP_LOGPROBS
        for name, fits, way_out in (
            ("temperature", 0 <= self.temperature < math.inf, "a finite number, 0 or more"),
            ("top_k", self.top_k is None or 1 <= self.top_k <= MOST_TOP_K, f"1 to {MOST_TOP_K}, or leave it out"),
            ("top_p", 0 < self.top_p <= 1, "a probability above 0, up to 1"),
            ("min_p", 0 <= self.min_p <= 1, "0 to 1"),
            ("repetition_penalty", penalty_fits, f"{1 / MOST_PENALTY:g} to {MOST_PENALTY:g}"),
            ("logprobs", logprobs_fit, f"0 to {MOST_TOP_LOGPROBS}, or leave it out"),
            ("seed", 0 <= self.seed <= LARGEST_SEED, f"0 to {LARGEST_SEED}"),
        ):
            if not fits:
                raise NapkinError(f"{name} is {getattr(self, name)}: use {way_out}")
        for token, bias in self.logit_bias:
            if token < 0 or not -MOST_BIAS <= bias <= MOST_BIAS:
                raise NapkinError(
                    f"logit_bias adds {bias} to token {token}: use a token id and {-MOST_BIAS:g} to {MOST_BIAS:g}"
                )
        if "" in self.stop:
            raise NapkinError("stop holds an empty text, which is everywhere: leave it out")
        if any(token < 0 for token in self.stop_ids):
            raise NapkinError(f"stop_ids holds {min(self.stop_ids)}: use token ids")

    @cached_property
    def bias_arrays(self) -> "tuple[array[int], array[float]]":
        """The ids and the numbers of `logit_bias`: read for every token, so made once."""
        return array("q", [token for token, _ in self.logit_bias]), array("f", [bias for _, bias in self.logit_bias])


@dataclass(frozen=True)
class Speculation:
    """Settings of the proposer of tokens, of which one pass of the model tests several."""

    draft: str | None = None
    """Run of a smaller model with the same tokenizer, which proposes tokens; the model tests several in one pass. Text
    has the same distribution, at temperature 0 the same tokens."""

    lookup: int = 0
    """Propose what followed the last tokens where they occurred before, up to this many of them compared; fast for text
    that repeats itself. The text is the same as without. 0 is off."""

    proposed: int | None = None
    """Tokens proposed for a pass; None is as many as are fastest by the seconds and acceptance so far. The text does
    not depend on it."""

    def __post_init__(self) -> None:
        if self.lookup < 0:
            raise NapkinError(f"lookup is {self.lookup}: use 1 or more tokens, or 0 for none")
        if self.draft is not None and self.lookup:
            raise NapkinError("both a draft model and a lookup are to propose tokens: use one of them")
        if self.proposed is not None and not 0 <= self.proposed <= MOST_PROPOSED:
            raise NapkinError(f"{self.proposed} tokens are to be proposed for each pass: use 0 to {MOST_PROPOSED}")
        if self.proposed is not None and not self.on:
            raise NapkinError(f"{self.proposed} tokens are to be proposed, and nothing proposes: use draft or lookup")

    @property
    def on(self) -> bool:
        """True if a draft or a lookup proposes tokens."""
        return self.draft is not None or self.lookup > 0


class _Settings(msgspec.Struct):
    """The settings in generation_config.json, with the library's defaults."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_id: int | list[int] | None = None


def read_generation_config(folder: StrPath) -> Sampling:
    """The settings of a folder, greedy unless they say `do_sample`; ids at which a text ends are `stop_ids`.

    A folder without the file is greedy, and config.json says where texts end. Where tokens are drawn, top_k is 50
    unless the file says otherwise, as in `transformers`; 0 is none. Raises NapkinError, or CorruptFile, for files that
    cannot be read or hold values that are out of range.
    """
    folder = Path(folder)
    path = folder / "generation_config.json"
    raw = read_json(path) if path.exists() else {}
    if raw.get("eos_token_id") is None:
        config = folder / "config.json"
        raw["eos_token_id"] = _converted(config, {"eos_token_id": read_json(config).get("eos_token_id")}).eos_token_id
    settings = _converted(path, raw)
    ends = settings.eos_token_id
    try:
        sampling = Sampling(
            temperature=1.0 if settings.temperature is None else settings.temperature,
            top_k=(50 if settings.top_k is None else settings.top_k) or None,
            top_p=1.0 if settings.top_p is None else settings.top_p,
            min_p=settings.min_p or 0.0,
            repetition_penalty=1.0 if settings.repetition_penalty is None else settings.repetition_penalty,
            stop_ids=() if ends is None else (ends,) if isinstance(ends, int) else tuple(ends),
        )
        if settings.do_sample:
            return sampling
        # Settings of draws are ignored, but for the penalty.
        return Sampling(
            temperature=0.0, repetition_penalty=sampling.repetition_penalty, stop_ids=sampling.stop_ids, top_p=1.0
        )
    except NapkinError as error:
        raise NapkinError(f"'{path}': {error}") from None


def _converted(path: Path, raw: dict[str, Any]) -> _Settings:
    try:
        return msgspec.convert({key: raw[key] for key in _Settings.__struct_fields__ if key in raw}, _Settings)
    except msgspec.ValidationError as error:
        raise CorruptFile(f"'{path}' holds a value of the wrong type ({error}): download it again") from None
