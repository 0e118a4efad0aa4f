"""Forms of matrices of integers, and their numbers: what compiled loops and those who call them both know.

The name makes it a part of the key of the compiled code's cache; it imports nothing, so that others may import it.
"""

PIECE = 32
"""Numbers of a vector that share a scale, and that divide the groups of a matrix."""
BF16, FP16, FP32 = range(3)
"""Formats of a matrix's scales and offsets."""
INT8, INT4, CENTRED_INT4, WHOLE_INT8, GROUPED_INT4, NUMBERS = range(6)
"""The forms of a matrix: q from -128 to 127; q from 0 to 15; q from 0 to 15, minus 8; the first with a scale per row
and the third with middles, as in numba_quantized.py; and numbers in the model's format, without integers."""
MOST_PIECES = 2**15
"""Pieces of a row of WHOLE_INT8, whose sums fit int32: 4 · 255 · 128 for each two of them."""
FEWEST_GROUPS = 8
"""Groups of a row of GROUPED_INT4, whose middles are read eight at a time."""
PIECES_OF_GROUPS = (2, 4, 8, 16, 32)
"""Pieces of a group of GROUPED_INT4."""
