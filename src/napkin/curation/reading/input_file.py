"""The files of a pipeline's input: found in a fixed order, recognised by their names, opened for reading.

A path is a file, a folder, a pattern such as `crawl/*.warc.gz`, or an address that fsspec knows, such as
`s3://bucket/pages/`. In a folder, everything is read except hidden entries, `__pycache__` and links to folders; a link
to a file outside the folder is set aside.
"""

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, cast

from napkin.curation.reading.bounded_stream import SetAside
from napkin.errors import NapkinError, first_line, import_extra
from napkin.files import regular

InputFormat = Literal["auto", "text", "html", "pdf", "jsonl", "parquet", "warc"]
"""Format of files; `auto` takes it from the end of each name."""

_ENDINGS: dict[str, InputFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".warc": "warc",
    ".wet": "warc",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".pdf": "pdf",
}
COMPRESSED = (".gz", ".zst")
_SKIPPED_FOLDERS = frozenset({"__pycache__"})


@dataclass(frozen=True)
class InputFile:
    """A file of the input, as it was when it was found."""

    name: str
    """The path or address as the user named it."""
    format: InputFormat
    bytes: int
    modified: str
    """Time of the last change, as its file system says; empty where it does not."""
    start: int | None = None
    """The offset at which a part of a file begins, of which `bytes` are read; None for the whole file."""
    number: int = 0
    """Documents of the file before this part, as their identities count them."""


def find_files(paths: Sequence[str], chosen: InputFormat = "auto") -> Iterator[InputFile | SetAside]:
    """The files in `paths`, in that order, those of a folder sorted by name.

    A pattern that finds a folder and the files in it gives each once. Raises NapkinError for a path that does not
    exist, and for a file that two paths have.
    """
    seen: dict[str, int] = {}
    for number, path in enumerate(paths):
        for files in _in_address(path, chosen) if "://" in path else _in_path(path, chosen):
            name = files.name if isinstance(files, InputFile) else files.identity
            if name not in seen:
                seen[name] = number
                yield files
            elif seen[name] != number:
                raise NapkinError(f"input '{name}' is found twice, in '{paths[seen[name]]}' too: name it once")


@contextmanager
def open_file(file: InputFile) -> Iterator[Any]:
    """The file's bytes, as a file that can be sought. Raises OSError."""
    if "://" in file.name:
        system, path = _file_system(file.name)
        with system.open(path, "rb") as opened:
            yield opened
    else:
        with open(file.name, "rb", opener=regular) as opened:
            yield opened


def format_of(name: str) -> InputFormat:
    """The format of a file, by the end of its name.

    >>> format_of("a/CC-MAIN.warc.wet.gz"), format_of("notes.md"), format_of("pages.jsonl.zst")
    ('warc', 'text', 'jsonl')
    """
    stem, ending = os.path.splitext(name.lower())
    if ending in COMPRESSED:
        ending = os.path.splitext(stem)[1]
    return _ENDINGS.get(ending, "text")


def _in_path(path: str, chosen: InputFormat) -> Iterator[InputFile | SetAside]:
    if not os.path.lexists(path):
        matches = _matches(path) if glob.has_magic(path) else []
        if not matches:
            raise NapkinError(f"input '{path}' does not exist: name a file, a folder, a pattern or an address")
        folders = set(matches)
        for match in matches:
            # The contents of a folder that was found are walked with it.
            if os.path.dirname(match) not in folders or not _is_walked(match):
                yield from _in_path(match, chosen)
    elif os.path.isdir(path):
        yield from _in_folder(path, os.path.realpath(path), chosen)
    else:
        yield _local_file(path, chosen)


def _is_walked(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path) and os.path.basename(path) not in _SKIPPED_FOLDERS


def _matches(pattern: str) -> list[str]:
    """Files that match a pattern, sorted, without hidden entries; `**` does not follow links to folders."""
    parts = Path(pattern).parts
    first = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    below = (*parts[first:], "*") if parts[-1] == "**" else parts[first:]
    # A folder, and the first part of the pattern that is not matched yet: each pair is looked at once.
    waiting = [(str(Path(*parts[:first])), 0)]
    seen, paths = set(waiting), set[str]()

    def look_into(folder: str, number: int) -> None:
        if (folder, number) not in seen:
            seen.add((folder, number))
            waiting.append((folder, number))

    while waiting:
        folder, number = waiting.pop()
        if below[number] == "**":
            look_into(folder, number + 1)
        for entry in _entries(folder):
            if isinstance(entry, SetAside):
                continue
            path = entry.name if folder == "." else entry.path
            if below[number] == "**":
                if entry.is_dir(follow_symlinks=False):
                    look_into(path, number)
            elif fnmatchcase(entry.name, below[number]):
                if number + 1 == len(below):
                    paths.add(path)
                else:
                    look_into(path, number + 1)
    return sorted(paths)


def _in_folder(folder: str, root: str, chosen: InputFormat) -> Iterator[InputFile | SetAside]:
    # Not recursive: folders may be nested more deeply than Python calls functions.
    waiting = [_entries(folder)]
    while waiting:
        entry = next(waiting[-1], None)
        if entry is None:
            waiting.pop()
        elif isinstance(entry, SetAside):
            yield entry
        elif isinstance(kind := _kind_in(entry, root), SetAside):
            yield kind
        elif kind == "folder":
            waiting.append(_entries(entry.path))
        elif kind == "file":
            yield _local_file(entry.path, chosen)


def _entries(folder: str) -> "Iterator[os.DirEntry[str] | SetAside]":
    try:
        with os.scandir(folder) as entries:
            ordered = sorted((each for each in entries if not each.name.startswith(".")), key=lambda each: each.name)
    except OSError as error:
        yield SetAside(_encodable(folder), "unreadable", error.strerror or str(error))
        return
    yield from ordered


def _kind_in(entry: "os.DirEntry[str]", root: str) -> Literal["file", "folder", "skipped"] | SetAside:
    """The kind of a folder's entry, or why it is set aside."""
    try:
        if not entry.is_symlink():
            if not entry.is_dir():
                return "file"
            return "skipped" if entry.name in _SKIPPED_FOLDERS else "folder"
        # A link that leads to itself, or over too many others, leads nowhere; a dangling link is reported as a file.
        with suppress(FileNotFoundError):
            os.stat(entry.path)
        target = os.path.realpath(entry.path)
        if os.path.commonpath([root, target]) != root:
            return SetAside(_encodable(entry.path), "link", "it leads out of the folder")
        return "skipped" if os.path.isdir(target) else "file"
    except OSError as error:
        return SetAside(_encodable(entry.path), "unreadable", error.strerror or str(error))


def _local_file(path: str, chosen: InputFormat) -> InputFile | SetAside:
    if (name := _encodable(path)) != path:
        return SetAside(name, "unreadable", "its name is not UTF-8")
    try:
        descriptor = regular(path)
    except OSError as error:
        return SetAside(path, "unreadable", error.strerror or str(error))
    status = os.fstat(descriptor)
    os.close(descriptor)
    return InputFile(path, _format(path, chosen), status.st_size, str(status.st_mtime_ns))


def _encodable(path: str) -> str:
    """A path as UTF-8 can have it; names of files may be any bytes."""
    return path.encode(errors="replace").decode()


def _in_address(address: str, chosen: InputFormat) -> Iterator[InputFile | SetAside]:
    system, path = _file_system(address)
    try:
        if glob.has_magic(path):
            entries = cast(dict[str, Any], system.glob(path, detail=True))
        elif system.isdir(path):
            entries = cast(dict[str, Any], system.find(path, detail=True))
        else:
            entries = {path: system.info(path)}
    except FileNotFoundError:
        entries = {}
    except Exception as error:
        raise NapkinError(f"input '{address}' cannot be listed ({first_line(error)}): choose another") from None
    files = {name: each for name, each in entries.items() if each.get("type", "file") == "file"}
    if not files:
        raise NapkinError(f"input '{address}' does not exist: name a file, a folder, a pattern or an address")
    for name in sorted(files):
        info = files[name]
        modified = next((str(info[key]) for key in ("mtime", "LastModified", "ETag", "etag") if info.get(key)), "")
        full = system.unstrip_protocol(name)
        yield InputFile(full, _format(name, chosen), int(info.get("size") or 0), modified)


def _file_system(address: str) -> tuple[Any, str]:
    try:
        return import_extra("fsspec.core", f"'{address}'").url_to_fs(address)
    except (ValueError, ImportError, OSError) as error:
        raise NapkinError(f"input '{address}' is not an address that fsspec knows ({first_line(error)})") from None


def _format(name: str, chosen: InputFormat) -> InputFormat:
    return format_of(name) if chosen == "auto" else chosen
