"""Accounting: count a training step without running it, price it, meter it, and reconcile rule, count and meter."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
