"""The files in a run's folder: the one declaration of each, and how it is read and written.

Start with `run_folder.py`. Each JSON file has a dataclass (there, and in `accounting_files.py` and `metrics.py`);
`run_record.py` reads them all for a report.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
