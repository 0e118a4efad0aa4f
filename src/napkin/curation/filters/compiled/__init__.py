"""The counts of `text_counts.py` and the lines of C4 as machine code, by numba: one pass over UTF-8 bytes."""
