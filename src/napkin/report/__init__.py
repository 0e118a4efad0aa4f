"""Reports: the table of rule, count and meter for a terminal, and self-contained HTML pages.

Start with `page.py`, the page of one run, made from its folder alone; `comparison.py` compares several.
`charts.py` makes the data of the charts, `charts.js` draws them with uPlot (in vendor/, MIT licence), `templates.py`
fills the HTML files in this folder.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
