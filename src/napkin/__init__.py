"""napkin trains language models from scratch and keeps the books while it does."""

import lazy_loader

__version__ = "0.1.0"

# Names are resolved at first use, so that `import napkin` and `napkin --help` do not wait for torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
