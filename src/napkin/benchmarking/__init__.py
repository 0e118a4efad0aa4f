"""The seconds of operators and modules, beside the machine's limits.

`OPERATORS` is the table of what `napkin bench` knows; calls are timed by `napkin.hardware.sample_in_turns`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
