"""The operators that a model's time goes into: one file an operator, its plain form first.

A plain form (`*_reference`) is the specification: a few lines of torch that hold every intermediate result. The forms
that run save memory or passes over it, and the tests hold them to the plain one. An operator that torch cannot see
through is a `torch.library` operator with a fake form, and its FLOPs are a line of `napkin.accounting.operators`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
