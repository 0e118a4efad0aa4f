"""Several processes (ranks) that train one model together: agreement between them, DDP and FSDP.

Start with `ranks.py`, whose `Ranks` is a single process; `process_group.py` implements it over torch.distributed.
`parallel_model.py` distributes the model.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
