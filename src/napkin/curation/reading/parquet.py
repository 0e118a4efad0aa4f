"""Parquet: a document per row, read by row groups and a few rows at a time."""

from collections.abc import Iterator
from typing import Any

import msgspec

from napkin.curation.reading.bounded_stream import FREE_BYTES, ReadLimits, SetAside, Unreadable, too_large
from napkin.curation.reading.jsonl import record_of_fields
from napkin.curation.stage import Record
from napkin.errors import first_line, import_extra
from napkin.units import format_bytes

_BATCH_ROWS = 64
_MOST_METADATA_BYTES = 2**26


def row_count(file: Any) -> int:
    """The rows of an open file that can be sought. Raises Unreadable where it is damaged."""
    arrow, parquet = import_extra("pyarrow", "a Parquet file"), import_extra("pyarrow.parquet", "a Parquet file")
    try:
        return parquet.read_metadata(file).num_rows
    except (arrow.ArrowException, ValueError, OSError) as error:
        raise Unreadable("damaged", f"as Parquet it cannot be read ({first_line(error)})") from None


def read_parquet(
    file: Any, n_bytes: int, name: str, limits: ReadLimits, text_field: str
) -> Iterator[Record | SetAside]:
    """The documents of an open file of `n_bytes` that can be sought; the number of each is that of its row.

    Raises Unreadable where the file is damaged, or repeats its values more often than `limits.ratio` allows.
    """
    arrow, parquet = import_extra("pyarrow", "a Parquet file"), import_extra("pyarrow.parquet", "a Parquet file")
    number = given = 0
    try:
        table = parquet.ParquetFile(
            file, thrift_string_size_limit=_MOST_METADATA_BYTES, thrift_container_size_limit=_MOST_METADATA_BYTES
        )
        if text_field not in table.schema_arrow.names:
            raise Unreadable("no text", f"it has no column '{text_field}' but {', '.join(table.schema_arrow.names)}")
        for batch in table.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
            for row in batch.to_pylist():
                number += 1
                identity = f"{name}#{number}"
                encoded = msgspec.json.encode(row, enc_hook=str)
                given += len(encoded)
                if len(encoded) > limits.document_bytes:
                    yield too_large(identity, len(encoded), limits, 0)
                else:
                    # Dates and bytes as JSON has them.
                    yield record_of_fields(msgspec.json.decode(encoded), identity, name, 0, text_field)
            if given > max(FREE_BYTES, limits.ratio * n_bytes):
                raise Unreadable(
                    "zip bomb",
                    f"{format_bytes(n_bytes)} give more than {format_bytes(given)}, the limit is "
                    f"{limits.ratio} per byte",
                )
    except (arrow.ArrowException, msgspec.MsgspecError, ValueError, RecursionError, OSError) as error:
        # Arrow's own OSErrors have no number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise Unreadable(
            "damaged", f"as Parquet it cannot be read after row {number:,} ({first_line(error)})"
        ) from None
