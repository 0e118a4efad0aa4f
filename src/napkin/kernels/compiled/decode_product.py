"""A bf16 matrix times a vector, compiled: what one new token computes most.

It reads every weight once, so memory sets the speed. torch's bf16 products of one row read at half that speed. Numbers
are widened to fp32 in registers and summed in fp32.
"""

from typing import Any

import numpy as np

from napkin.kernels.compiled.number_conversions import FASTMATH, bf16_at, widened
from napkin.machine_code.compiled_function import CompiledFunction
from napkin.machine_code.pointers import f32_at


@CompiledFunction.with_options(fastmath=FASTMATH)
def matrix_vector(weight: Any, x: Any, y: Any, n_rows: Any, n_columns: Any) -> None:
    """y = weight · x; weight is bf16 [n_rows, n_columns], x and y are float32."""
    vector, result = f32_at(x), f32_at(y)
    for i in range(n_rows):
        row = bf16_at(weight + 2 * i * n_columns)
        total = np.float32(0)
        for j in range(n_columns):
            total += widened(row[j]) * vector[j]
        result[i] = total
