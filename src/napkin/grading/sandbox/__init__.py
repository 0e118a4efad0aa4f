"""The sandbox: programs of a model, and functions of the user's, in processes that cannot do harm.

Start with `program_tests.py`, code against tests; `program_process.py` has a process for each program, which
`fork_server.py` forks and `confinement.py` confines; `program_roles.py` is what it does. A function of the user's has
one process for all answers: `own_function.py`.
"""
