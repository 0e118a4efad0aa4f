"""The seconds of operators and modules, beside the machine's limits.

`sample_in_turns` times calls, `median_interval` and `ratio_interval` say how sure the result is; `OPERATORS` is the
table of what `napkin bench` knows.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
