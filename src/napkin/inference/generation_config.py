"""generation_config.json of a Hugging Face folder: how its makers draw tokens, and where a text ends."""

from pathlib import Path
from typing import Any

import msgspec

from napkin.errors import CorruptFile, NapkinError
from napkin.files import StrPath
from napkin.inference.settings import Sampling
from napkin.model.huggingface.folder_files import read_json


class _Settings(msgspec.Struct):
    """With the library's defaults."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_id: int | list[int] | None = None


class _End(msgspec.Struct):
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
        raw["eos_token_id"] = _converted(folder / "config.json", read_json(folder / "config.json"), _End).eos_token_id
    settings = _converted(path, raw, _Settings)
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


def _converted(path: Path, raw: dict[str, Any], kind: type[Any]) -> Any:
    try:
        return msgspec.convert({key: raw[key] for key in kind.__struct_fields__ if key in raw}, kind)
    except msgspec.ValidationError as error:
        raise CorruptFile(f"'{path}' holds a value of the wrong type ({error}): download it again") from None
