"""The sandbox: programs of a model, and functions of the user's, in processes that cannot do harm.

Start with `program_tests.py`, code against tests; `confinement.py` says what a process may no longer do, and
`confined_process.py` starts one.
"""
