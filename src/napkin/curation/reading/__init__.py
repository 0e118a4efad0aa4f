"""Foreign files as records: text, JSONL, Parquet and web archives, from this machine or any fsspec address.

Start with `input_file.py`, which finds and opens files, and `documents.py`, which reads one; a file per format. What
cannot be read is a `SetAside`: the file or the document, and why; reading goes on after it.
"""
