"""The file of a quality model: safetensors with one tensor, `weights` [columns], and a header of strings.

format = napkin quality model 1, max_n, scale, shift
"""

import math
import os
from functools import lru_cache
from pathlib import Path

import numpy as np

from napkin.curation.filters.quality_model import QualityModel
from napkin.errors import CorruptFile, NapkinError
from napkin.files import atomic_write_bytes, refuse_irregular

FORMAT = "napkin quality model 1"
MAX_COLUMNS = 2**28
MAX_N = 5


def write_quality_model(path: Path, model: QualityModel) -> None:
    """Write a model to a new file. Raises NapkinError if the file exists or cannot be written."""
    from safetensors.numpy import save

    header = {"format": FORMAT, "max_n": str(model.max_n), "scale": repr(model.scale), "shift": repr(model.shift)}
    atomic_write_bytes(path, save({"weights": model.weights}, header))


def read_quality_model(path: str) -> QualityModel:
    """Read a model; one that was read before and has not changed since is not read again.

    Raises:
        NapkinError: the file cannot be read, or is not a quality model.
        CorruptFile: it is damaged.
    """
    refuse_irregular(path)
    try:
        status = os.stat(path)
    except OSError as error:
        raise NapkinError(f"the quality model '{path}' cannot be read: {error.strerror}") from None
    return _read(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4)
def _read(path: str, changed: int, size: int) -> QualityModel:
    del changed
    from safetensors import SafetensorError, safe_open

    if size > 4 * MAX_COLUMNS + 2**20:
        raise NapkinError(f"'{path}' has {size} bytes, a quality model at most {4 * MAX_COLUMNS}: it is another file")
    try:
        with safe_open(path, "numpy") as file:
            header = file.metadata() or {}
            weights = file.get_tensor("weights") if header.get("format") == FORMAT else None
    except (SafetensorError, OSError) as error:
        raise CorruptFile(f"'{path}' is not a quality model, or is damaged ({error}): train one again") from None
    if weights is None:
        raise NapkinError(f"'{path}' is not a quality model: make one with `napkin data train-classifier`")
    try:
        max_n, scale, shift = int(header["max_n"]), float(header["scale"]), float(header["shift"])
    except (KeyError, ValueError):
        raise CorruptFile(f"'{path}' is damaged: its header is not whole; train the model again") from None
    n = weights.size
    plausible = weights.shape == (n,) and weights.dtype == np.float32 and 2 <= n <= MAX_COLUMNS and n & (n - 1) == 0
    finite = math.isfinite(scale) and math.isfinite(shift) and np.isfinite(weights).all()
    if not (plausible and finite and 1 <= max_n <= MAX_N):
        raise CorruptFile(f"'{path}' is damaged: its numbers are not those of a quality model; train it again")
    return QualityModel(weights, max_n, scale, shift)
