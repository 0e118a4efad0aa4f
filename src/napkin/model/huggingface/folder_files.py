"""Files of a Hugging Face folder, which comes from elsewhere: none outside of it is opened, and sizes are bounded."""

import errno
import json
from pathlib import Path
from typing import Any

from napkin.errors import CorruptFile, NapkinError, first_line
from napkin.files import regular

# An index of a hundred thousand weights has ten million.
_MAX_JSON_CHARACTERS = 2**26


def path_inside(folder: Path, name: str) -> Path:
    """The path of a regular file in a folder.

    Raises NapkinError for any other name, and for links to other places; OSError if it cannot be looked at.
    """
    path = folder / name
    if name in ("", ".", "..") or len(name) > 255 or any(character in name for character in "/\\:\0"):
        raise NapkinError(f"'{folder}' names the file {name[:200]!r}, which is not in the folder: download it again")
    try:
        whole = path.resolve(strict=True)
    except RuntimeError as error:
        raise OSError(errno.ELOOP, first_line(error)) from None
    # In the hub's cache, a folder of links stands beside the folder of files, two levels up.
    if whole.parent not in (folder.resolve(), (folder / ".." / ".." / "blobs").resolve()):
        raise NapkinError(f"'{path}' is a link to a place outside of the folder: copy the file")
    if not whole.is_file():
        raise NapkinError(f"'{path}' is not a file: name a Hugging Face model's folder")
    return path


def read_text(path: Path, most_characters: int = _MAX_JSON_CHARACTERS) -> str:
    """The text of a file in a folder; see `path_inside`.

    Raises NapkinError if it cannot be read, CorruptFile if it is not UTF-8 or has more characters.
    """
    try:
        with open(path_inside(path.parent, path.name), encoding="utf-8", opener=regular) as file:
            text = file.read(most_characters + 1)
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read ({error.strerror}): name a Hugging Face model's folder") from None
    except ValueError as error:
        raise CorruptFile(f"'{path}' is not UTF-8 ({error}): download it again") from None
    if len(text) > most_characters:
        raise CorruptFile(f"'{path}' has more than {most_characters} characters: download it again")
    return text


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a folder; raises what `read_text` does, and CorruptFile for anything else."""
    try:
        value = json.loads(read_text(path))
    except RecursionError:
        raise CorruptFile(f"'{path}' is nested too deeply: download it again") from None
    except ValueError as error:
        raise CorruptFile(f"'{path}' is not JSON ({error}): download it again") from None
    if not isinstance(value, dict):
        raise CorruptFile(f"'{path}' is not a JSON object: download it again")
    return value
