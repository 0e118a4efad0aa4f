"""`napkin evaluate ngrams`: bits per byte of n-gram models, beside gzip and xz."""

import gzip
import lzma
import time
from dataclasses import dataclass
from pathlib import Path

from napkin.cli.common.files import folder_for, open_documents, refuse_existing
from napkin.cli.common.options import JsonOption, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import print_json, print_table, say
from napkin.errors import NapkinError
from napkin.units import format_bytes, format_seconds


@dataclass(frozen=True)
class NgramOptions(JsonOption):
    """Train n-gram models of bytes by interpolated modified Kneser-Ney on one text, and say how many bits per byte they
    give to another, beside gzip and xz: what a language model has to be better than."""

    train: tuple[str, ...] = ()
    """Training text: files, folders, or stdlib: for Python's own library; or give --model."""
    text: tuple[str, ...] = ()
    """Text to predict: files or folders; required. It should have no part in the training text."""
    orders: tuple[int, ...] = (6,)
    """Bytes of an n-gram, 2 to 8; a model is trained for each."""
    model: str | None = None
    """A model that --out has written, instead of training one."""
    out: str | None = None
    """File for the model of the last order, which napkin evaluate text --ngrams reads."""
    suffixes: tuple[str, ...] = ()
    """Endings of the files that are read in folders: --suffixes .txt .md; none is all files."""


@command("evaluate ngrams", NgramOptions)
def evaluate_ngrams(options: NgramOptions) -> None:
    if bool(options.train) == (options.model is not None):
        raise NapkinError("name one of --train, a text to train on, and --model, a trained model")
    if not options.text:
        raise NapkinError("no text to predict is named: give --text FILE")
    if options.out is not None:
        if options.model is not None:
            raise NapkinError("--out is of a model to be trained: leave it out beside --model")
        refuse_existing(Path(options.out))
    from napkin.evaluation.ngrams import NgramModel, train_ngrams, training_bytes

    texts = [document.data for document in open_documents(options.text, options.suffixes)]
    n_bytes, whole = sum(map(len, texts)), b"".join(texts)
    if not whole:
        raise NapkinError(f"'{options.text[0]}' has no text: give at least one byte")
    rows = []
    with progress_line("counting") as line:
        if options.model is not None:
            models = [(NgramModel.load(options.model), 0, 0.0)]
        else:
            models, documents = [], [each.data for each in open_documents(options.train, options.suffixes)]
            size = sum(map(len, documents))
            for order in options.orders:
                begin = time.perf_counter()
                model = train_ngrams(documents, order, progress=lambda done: line(done, size, format_bytes(done)))
                models.append((model, size, time.perf_counter() - begin))
        line.retitle("predicting")
        for model, size, seconds in models:
            rows.append(
                {
                    "order": model.order,
                    "bits_per_byte": model.bits_per_byte(texts),
                    "grams": sum(model.n_grams),
                    "bytes": model.n_bytes,
                    "training_bytes": size,
                    "training_seconds": seconds,
                    "training_memory_at_most": training_bytes(size, model.order) if size else None,
                }
            )
        if options.out is not None:
            with folder_for(Path(options.out)):
                models[-1][0].save(options.out)
        line.retitle("compressing")
        compressed = {
            "gzip -9": 8 * len(gzip.compress(whole, compresslevel=9)) / n_bytes,
            "xz -9": 8 * len(lzma.compress(whole, preset=9)) / n_bytes,
        }
    if options.json:
        print_json({"bytes": n_bytes, "models": rows, "compressors": compressed, "out": options.out})
        return
    table = [(name, f"{bits:.4f}", "", "", "") for name, bits in compressed.items()]
    table += [
        (
            f"{row['order']}-grams",
            f"{row['bits_per_byte']:.4f}",
            f"{row['grams']:,}",
            format_bytes(row["bytes"]),
            format_seconds(row["training_seconds"]) if row["training_bytes"] else "",
        )
        for row in rows
    ]
    print_table(("", "bits per byte", "grams", "memory", "trained in"), table)
    trained = f"trained on {format_bytes(models[0][1])}, " if models[0][1] else ""
    say(f"{trained}predicting {format_bytes(n_bytes)} in {len(texts):,} documents, each by itself")
    if options.out is not None:
        say(f"wrote {options.out}", wrap=False)
