"""The same operators as Triton kernels, for CUDA and ROCm devices; each file holds the kernels of one operator.

These files import triton, an extra of the project: the operators in the folder above import them at the first call on a
device that they are for (`usable.py`). The plain forms there are the specification.
"""
