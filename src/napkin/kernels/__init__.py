"""The operators that take most of a model's time, a folder per operator, its forms beside each other.

A reference (`*_reference`) is the specification: a few lines of torch that hold every intermediate result. It stands
first, and the other forms, which save memory or passes over it, are tested against it: `numba_*.py` are compiled loops
for a CPU, functions of addresses and numbers that check nothing, and `triton_*.py` are Triton kernels for CUDA and ROCm
devices. These are imported at the first call that needs them, since triton is an extra of the project.

What torch cannot trace as it is written, in another language or in loops that depend on the data, is an operator of
`torch.library` with a fake implementation, as in `grouped_matmul`; its FLOPs are an entry of
`napkin.accounting.contractions.CONTRACTIONS`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
