"""Policy gradients: a model learns from rewards of its own answers.

Start with `algorithms.py`, the table of which algorithm is made of which parts. `credit.py` makes advantages of rewards
and `objective.py` the loss; `advantages.py`, `ratios.py`, `clipping.py`, `kl.py` and `overlong.py` are the parts.
"""
