"""An HTTP server with the interface of OpenAI's, and a page to chat on.

`application.py` has the routes, `request_body.py` what a request may say, `completion_job.py` runs one, `answers.py`
writes what is sent back; `run.py` starts the server and drains it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
