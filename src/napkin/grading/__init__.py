"""Is this answer right? One grader for evaluation and for rewards: a text and a reference in, 1 or 0 out.

Start with `mathematics/final_answer.py`, which finds a text's answer; `mathematics/math_answer.py` compares
that with what is right, `answers.py` has the simpler ways, and `sandbox/` runs programs.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
