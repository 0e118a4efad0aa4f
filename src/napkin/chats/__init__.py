"""Conversations as data: their files, chat templates, and the tokens that are trained on.

Start with `chat_encoder.py`: messages become a `TokenSequence`; `read_conversations.py` reads files of messages.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
