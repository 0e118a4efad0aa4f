"""Checkpoints: written completely or not at all, verified by checksums when they are read.

Start with `folder.py` (the format) and `writer.py`, which writes in the background; `sharded_writer.py` writes on
several ranks, `restore.py` reads.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
