"""Checkpoints: written completely or not at all, verified by checksums when they are read.

Start with `folder.py` (the format) and `write.py`; `load.py` and `restore.py` read. `writer.py` writes in the
background, `sharded_writer.py` on several ranks.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
