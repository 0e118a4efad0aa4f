"""Functions compiled by numba to machine code that is built once, kept between processes without pickles, and loaded.

A package with such functions has one `MachineCode` (loading.py), which loads its modules. Nothing is imported here, so
that asking what is loaded or cached imports no numba.
"""
