"""The tokens that a Hugging Face folder puts before every text, such as one for its beginning."""

from pathlib import Path
from typing import Any

from napkin.errors import NapkinError
from napkin.model.huggingface.folder_files import read_json
from napkin.tokenizer.base import Tokenizer


def read_first_ids(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the template in tokenizer.json puts there, or else `bos_token` where tokenizer_config.json adds it.

    An `add_bos_token` of false takes it out of the template. Raises NapkinError for files that cannot be read.
    """
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    first = _special_id(settings.get("bos_token"), tokenizer)
    found = _of_template(read_json(folder / "tokenizer.json"))
    match settings.get("add_bos_token"):
        case True if not found and first is not None:
            return (first,)
        case False if found == (first,):
            return ()
    return found


def _of_template(document: dict[str, Any]) -> tuple[int, ...]:
    post_processor = document.get("post_processor") or {}
    ids: list[int] = []
    try:
        for processor in post_processor.get("processors") or [post_processor]:
            if processor.get("type") != "TemplateProcessing":
                continue
            for piece in processor["single"]:
                if "SpecialToken" not in piece:
                    break
                ids += processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
        return tuple(int(number) for number in ids)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise NapkinError("tokenizer.json has a post_processor that cannot be read: download it again") from None


def _special_id(token: Any, tokenizer: Tokenizer) -> int | None:
    text = token.get("content") if isinstance(token, dict) else token
    return tokenizer.special_tokens.get(text) if isinstance(text, str) else None
