"""From raw pages to documents: pipelines of stages over shards, resumable to the byte, planned and reconciled.

Start with `stage.py`: a document with its provenance, and the stages that it goes through.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
