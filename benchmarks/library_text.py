"""Python's own library as token files, as `napkin demo` makes them: made once, kept among napkin's caches."""

from pathlib import Path

from napkin.cli import main
from napkin.cli.common.files import STANDARD_LIBRARY
from napkin.files import cache_folder
from napkin.recipe.data_config import DataConfig


def library_text(vocab_size: int) -> DataConfig:
    """A BPE of that many tokens, trained on the text; its training and validation tokens."""
    folder = cache_folder() / "benchmarks" / f"stdlib-{vocab_size}"
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.exists():
        _napkin("tokenizer", "train", STANDARD_LIBRARY, "--vocab-size", str(vocab_size), "--out", str(tokenizer))
    if not (folder / "validation.tokens").exists():
        _napkin("tokenizer", "encode", STANDARD_LIBRARY, "--tokenizer", str(tokenizer), "--out", str(folder))
    return DataConfig(str(folder / "train.tokens"), str(folder / "validation.tokens"), str(tokenizer))


def _napkin(*command: str) -> None:
    folder = Path(command[-1])
    (folder.parent if folder.suffix else folder).mkdir(parents=True, exist_ok=True)
    if main(list(command)):
        raise SystemExit(f"napkin {' '.join(command)} has failed: its own message is above")
