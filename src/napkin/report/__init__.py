"""Reports on a run: the table of rule, count and meter, and self-contained HTML pages."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
