"""The compiled core of the language classifier, in numba: n-grams, the sum of their rows, and training."""
