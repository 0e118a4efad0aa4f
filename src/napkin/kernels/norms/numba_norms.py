"""Layer and RMS normalization of rows and their gradients, compiled: a row is read once and stays in cache."""

import numpy as np

from napkin.kernels.numba_numbers import FASTMATH, float_argument, narrow_row, widen_row
from napkin.machine_code.compiled_function import CompiledFunction
from napkin.machine_code.pointers import f32_at


@CompiledFunction.with_options(fastmath=FASTMATH)
def norm_forward(x, x_is_bf16, gain, bias, y, y_is_bf16, means, scales, start, stop, n, eps, centred, buffer):
    """y = (x - mean(x)) · scale · gain + bias of the rows start to stop, scale = 1/sqrt(var(x) + eps); RMSNorm where
    not centred: without a mean.

    Means and scales are kept; they, gain and bias (or 0) are float32. The buffer holds n.
    """
    row = f32_at(buffer)
    gain_of, mean_of, scale_of = f32_at(gain), f32_at(means), f32_at(scales)
    for i in range(start, stop):
        widen_row(x, x_is_bf16, i * n, n, row)
        mean = np.float32(0)
        if centred:
            for j in range(n):
                mean += row[j]
            mean /= np.float32(n)
            for j in range(n):
                row[j] -= mean
            mean_of[i] = mean
        squares = np.float32(0)
        for j in range(n):
            squares += row[j] * row[j]
        scale = np.float32(1) / np.float32(np.sqrt(squares / np.float32(n) + float_argument(eps)))
        scale_of[i] = scale
        for j in range(n):
            row[j] = row[j] * scale * gain_of[j]
        if bias:
            bias_of = f32_at(bias)
            for j in range(n):
                row[j] += bias_of[j]
        narrow_row(row, y, y_is_bf16, i * n, n)


@CompiledFunction.with_options(fastmath=FASTMATH)
def norm_backward(
    gradient, gradient_is_bf16, x, x_is_bf16, gain, means, scales, grad_x, grad_gains, grad_biases, first_sum,
    last_sum, n_rows, rows_per_sum, n, centred, buffer,
):  # fmt: skip
    """The gradient of x, in its format, of the rows of the sums first_sum to last_sum; and of each sum's rows, the
    gradients of gain and bias, float32 [sums, n] (bias may be 0).

    The buffer holds 2 · n.
    """
    grad, normed = f32_at(buffer), f32_at(buffer + 4 * n)
    gain_of, mean_of, scale_of = f32_at(gain), f32_at(means), f32_at(scales)
    for part in range(first_sum, last_sum):
        grad_gain = f32_at(grad_gains + 4 * n * part)
        for j in range(n):
            grad_gain[j] = np.float32(0)
        if grad_biases:
            grad_bias = f32_at(grad_biases + 4 * n * part)
            for j in range(n):
                grad_bias[j] = np.float32(0)
        for i in range(part * rows_per_sum, min((part + 1) * rows_per_sum, n_rows)):
            widen_row(gradient, gradient_is_bf16, i * n, n, grad)
            widen_row(x, x_is_bf16, i * n, n, normed)
            mean, scale = mean_of[i] if centred else np.float32(0), scale_of[i]
            if grad_biases:
                grad_bias = f32_at(grad_biases + 4 * n * part)
                for j in range(n):
                    grad_bias[j] += grad[j]
            along, sums = np.float32(0), np.float32(0)
            for j in range(n):
                z = (normed[j] - mean) * scale
                grad_gain[j] += grad[j] * z
                g = grad[j] * gain_of[j]
                normed[j], grad[j] = z, g
                along += g * z
                sums += g
            along /= np.float32(n)
            sums = sums / np.float32(n) if centred else np.float32(0)
            for j in range(n):
                grad[j] = (grad[j] - sums - normed[j] * along) * scale
            narrow_row(grad, grad_x, x_is_bf16, i * n, n)
