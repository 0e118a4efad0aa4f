"""Hardware: the catalogue of accelerators, the host, and its measured speed.

`sample_in_turns` times calls, `median_interval` and `ratio_interval` say how sure the result is.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
