"""Charts in notebooks: the studio's planner and pages of ideas, and the reports of runs, as widgets.

A widget is a page in a frame. What the page of the studio asks its server, the frame asks the kernel: the same
functions answer. It needs anywidget: `pip install '.[notebooks]'` in the clone.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
