"""Conversations as data: files of them, chat templates, which tokens are learned, token files with that mask.

Start with `chat_encoder.py`: messages become a `TokenSequence`; `read_chats.py` has the files of messages.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
