"""Kernels for a CPU, compiled by numba: built once, kept between processes, loaded by loading.py.

Each module holds functions of addresses and numbers, which check nothing; the operators that call them are in
napkin.kernels.
"""
