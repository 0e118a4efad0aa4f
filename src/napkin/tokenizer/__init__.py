"""Strings to token ids and back: characters, bytes, words or byte-pair encoding; trained on text, saved to a file."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
