"""Mixing tokens by a state that goes from token to token, and the convolution before it."""
