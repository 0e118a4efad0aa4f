"""Mixing tokens by a state that goes from token to token, and the convolution before it."""

CHUNK = 64
"""Tokens of a chunk. Products within chunks grow with it, and the states that are kept for the backward pass shrink; at
64 and states of 128 the former are a third of all products."""
