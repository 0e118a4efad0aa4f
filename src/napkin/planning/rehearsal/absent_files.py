"""Data files that a script would read and this machine lacks: small ones of their kind take their place.

A file of tokens (`.bin`) has the header that llm.c and its descendants write (256 numbers of 32 bits: 20240520, 1, the
number of tokens) and tokens of 16 bits; read without a header, the header is some tokens more. A pattern that matches
nothing matches one such file, and a folder that is absent has one for each part of a data set. What a script writes
goes into its own folder, and is lost.
"""

import builtins
import glob
import gzip
import io
import json
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

N_TOKENS = 2**23
MAGIC = 20240520
CHANGES = {
    **dict.fromkeys(("os.remove", "os.rmdir", "os.truncate", "os.chmod", "os.chown", "os.utime", "shutil.rmtree"), 1),
    **dict.fromkeys(("os.rename", "shutil.move"), 2),
}
"""Python's audit events of functions that change files, and how many of their arguments are paths."""
KINDS = (".bin", ".npy", ".npz", ".txt", ".json", ".jsonl", ".tokens", ".csv", ".gz")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ abcdefghijklmnopqrstuvwxyz !$&',-.3:;?"
"""The characters of Tiny Shakespeare but for the end of a line, on which scripts that train on letters mostly train."""


class AbsentFiles:
    """Answers for files that are absent; `made` has the names that the script asked for."""

    def __init__(self, folder: Path, source: str = "") -> None:
        self.folder, self.source = folder, source
        self.made: dict[str, Path] = {}
        self.listed: dict[str, list[str]] = {}
        self.open = builtins.open
        caches = os.environ.get("NAPKIN_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME"), Path.home() / ".cache"
        places = (folder.parent, "/dev", "/proc", *(each for each in caches if each))
        # Files of packages and of torch's compiler are never replaced.
        self.complete = tuple(f"{each}{os.sep}" for each in (sys.prefix, sys.base_prefix, folder.parent / "torch"))
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.parent / "torch")
        self.changeable = [Path(os.path.realpath(each)) for each in places]

    def install(self) -> None:
        """Replace the functions through which scripts look for files and open them, and refuse what would change files
        that are not the rehearsal's."""
        # Otherwise compiled modules would be written next to the user's, and temporary files to the shared folder.
        sys.dont_write_bytecode = True
        tempfile.tempdir = str(self.folder.parent)
        sys.addaudithook(self._refuse_changes)
        builtins.open = io.open = self._open  # pyright: ignore
        pathlib.Path.open = lambda path, *a, **k: self._open(path, *a, **k)  # pyright: ignore
        for name in ("exists", "isfile"):
            setattr(os.path, name, self._asked(getattr(os.path, name)))
        os.listdir = self._listed(os.listdir)
        mkdir = os.mkdir
        self.mkdir = mkdir
        os.mkdir = self._mkdir
        os.path.getsize = self._given(os.path.getsize)
        for owner in (pathlib.Path, pathlib.PosixPath):
            for name in ("exists", "is_file"):
                setattr(owner, name, self._asked(getattr(owner, name)))
            owner.stat = self._given(owner.stat)
        for name in ("fromfile", "memmap", "load"):
            function = getattr(np, name)
            setattr(np, name, _Mapped(self, function) if isinstance(function, type) else self._given(function))
        import torch

        torch.from_file = self._given(torch.from_file)
        glob.glob = self._matched(glob.glob)
        path_glob = pathlib.Path.glob
        pathlib.Path.glob = lambda path, pattern, **k: self._path_glob(path_glob, path, pattern, **k)  # pyright: ignore

    def _refuse_changes(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Raise PermissionError where Python is about to remove, rename or alter a file outside of the folder."""
        if event not in CHANGES:
            return
        for path in arguments[: CHANGES[event]]:
            if not isinstance(path, (str, bytes, os.PathLike)):
                continue
            name = os.path.abspath(os.fsdecode(path))
            # Removing and renaming act on the entry of a folder, even if it is a link; everything else follows links.
            followed = event in ("os.truncate", "os.chmod", "os.chown", "os.utime")
            real = Path(os.path.realpath(name if followed else os.path.dirname(name)))
            if not any(real.is_relative_to(each) for each in self.changeable):
                raise PermissionError(f"{event.removeprefix('os.')} of '{os.fsdecode(path)}', a file of yours")

    def present(self, path: Any) -> Any:
        """The path of a file that can be read in place of `path`: itself if it is there."""
        if not isinstance(path, (str, os.PathLike)):
            return path
        name = os.fspath(path)
        if not isinstance(name, str) or not name.endswith(KINDS) or name.startswith(self.complete):
            return path
        try:
            os.stat(name)
        except OSError:
            if name not in self.made:
                self.made[name] = self._make(name)
            made = self.made[name]
            return made if isinstance(path, os.PathLike) else str(made)
        return path

    def _make(self, name: str) -> Path:
        place = Path(name)
        if place.is_absolute() and not place.is_relative_to(self.folder):
            place = self.folder / "absent" / place.relative_to("/")
        os.makedirs(place.parent, exist_ok=True)
        if name.endswith((".bin", ".tokens")):
            head = np.zeros(256, "<i4")
            head[:3] = self._compared(0, r"\d{8}", MAGIC), self._compared(1, r"\d{1,2}", 1), N_TOKENS
            wide = "uint32" in self.source and "uint16" not in self.source
            with self.open(place, "wb") as file:
                file.write(head.tobytes())
                file.truncate(head.nbytes + (4 if wide else 2) * N_TOKENS)
        elif name.endswith(".gz"):
            with self.open(place, "wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=1) as file:
                file.write(bytes(100_000_000))
        elif name.endswith(".npy"):
            np.lib.format.open_memmap(str(place), "w+", np.uint16, (N_TOKENS,)).flush()
        elif name.endswith(".npz"):
            np.savez(place, tokens=np.zeros(2**20, np.int64))
        else:
            line = "All that a step takes can be counted before it runs. "
            record = {"text": line, "prompt": line, "completion": line, "question": line, "answer": line}
            text = json.dumps([record] * 64) if name.endswith(".json") else line + "\n"
            text = json.dumps(record) + "\n" if name.endswith(".jsonl") else text
            text = "text,label\n" + (f"{line},0\n" * 999) if name.endswith(".csv") else text
            if name.endswith(".txt"):
                text = f"{line}{LETTERS}\n"
            repeats = 1 if name.endswith((".json", ".csv")) else 9000
            with self.open(place, "w", encoding="utf-8") as file:
                file.write(text * repeats)
        return place

    def _compared(self, place: int, number: str, otherwise: int) -> int:
        """Return the number that the script compares a place of a header with."""
        match = re.search(rf"\[{place}\]\s*[!=]=\s*({number})\b", self.source)
        return int(match[1]) if match else otherwise

    def _open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) & set("wax+"):
            return self.open(self._own(file), mode, *args, **kwargs)
        return self.open(self.present(file), mode, *args, **kwargs)

    def _mkdir(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """A folder, with those above it: the script's may be there where it usually runs."""
        own = self._own(path)
        missing = []
        above = Path(os.fspath(own)).parent
        while not os.path.isdir(above):
            missing.append(above)
            above = above.parent
        for each in reversed(missing):
            self.mkdir(each)
        # The script sees no folder where it has made this one, and may make it again.
        if own == path or not os.path.isdir(own):
            self.mkdir(own, *args, **kwargs)

    def _own(self, file: Any) -> Any:
        """Return the path at which a file that the script names is written: in the script's own folder, also
        where links lead out of it."""
        if not isinstance(file, (str, os.PathLike)):
            return file
        real = Path(os.path.realpath(os.fspath(file)))
        if real.is_relative_to(self.folder.parent) or real.is_relative_to("/dev") or real.is_relative_to("/proc"):
            return file
        own = self.folder / "written" / real.relative_to("/")
        os.makedirs(own.parent, exist_ok=True)
        return own

    def _asked(self, function: Callable[..., bool]) -> Callable[..., bool]:
        return lambda path, *a, **k: function(self.present(path), *a, **k)

    def _given(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda path, *a, **k: function(self.present(path), *a, **k)

    def _matched(self, function: Callable[..., Any]) -> Callable[..., list[str]]:
        def find(pattern: Any, *args: Any, **kwargs: Any) -> list[str]:
            match = function(pattern, *args, **kwargs)
            name = os.fspath(pattern)
            return match if match or not name.endswith(KINDS) else [str(self.present(_filled(name)))]

        return find

    def _listed(self, function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """A folder that is absent has a file for each part of a data set, of a kind that the script reads."""

        def names(path: Any = ".") -> list[Any]:
            name = os.path.abspath(os.fsdecode(path)) if isinstance(path, (str, os.PathLike)) else ""
            try:
                if name not in self.listed:
                    return function(path)
            except FileNotFoundError:
                if not name or name.startswith(self.complete):
                    raise
                kind = ".npy" if "np.load(" in self.source else next((k for k in KINDS if k in self.source), ".bin")
                self.listed[name] = [f"{part}_000000{kind}" for part in ("train", "val", "valid", "test")]
            return list(self.listed[name])

        return names

    def _path_glob(self, function: Callable[..., Any], path: Path, pattern: str, **kwargs: Any) -> Any:
        paths = list(function(path, pattern, **kwargs))
        if paths or not str(pattern).endswith(KINDS):
            return iter(paths)
        return iter([Path(self.present(path / _filled(str(pattern))))])


class _Mapped(type):
    """A class whose first argument is a file."""

    def __new__(cls, files: AbsentFiles, base: type) -> Any:
        def make(new: type, path: Any, *args: Any, **kwargs: Any) -> Any:
            return base.__new__(base, files.present(path), *args, **kwargs)  # pyright: ignore

        return type(base.__name__, (base,), {"__new__": make})


def _filled(pattern: str) -> str:
    """A name that a pattern matches."""
    return re.sub(r"\[[^]]*\]|\?", "0", pattern).replace("**/", "").replace("*", "000000")
