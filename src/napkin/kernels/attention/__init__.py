"""Softmax attention. Start with `reference.py`, the formula; each other file is a form of it: what it saves, where it
computes. `numba_*.py` are the loops for a CPU, `triton_*.py` the kernels for a GPU that a form calls."""
