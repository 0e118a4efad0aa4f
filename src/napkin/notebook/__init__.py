"""Charts in notebooks: the studio's planner and pages of ideas, and the reports of runs, as widgets.

A widget is a page in a frame. The requests that the studio's page sends to its server, the frame sends to the kernel,
where the same functions answer them. It needs anywidget: `pip install '.[notebooks]'` in the clone.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
