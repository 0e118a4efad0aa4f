"""Plans: memory, FLOPs, seconds and dollars of a run before it starts.

Start with `planner.py`: it resolves the recipe for a machine (`step/machine.py`), counts the step and returns
a `Plan` (`step/run_plan.py`).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
