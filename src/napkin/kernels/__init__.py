"""The operators that take most of a model's time: one file per operator, its reference implementation first.

A reference (`*_reference`) is the specification: a few lines of torch that hold every intermediate result. The other
implementations save memory or passes over it, and are tested against the reference. One that torch cannot trace, as it
is written in another language or its loops depend on the data, is a `torch.library` operator with a fake
implementation, as in `grouped_matmul`; its FLOPs are an entry of `napkin.accounting.contractions.CONTRACTIONS`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
