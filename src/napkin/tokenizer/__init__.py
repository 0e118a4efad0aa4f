"""Strings to token ids and back: characters, bytes, words, byte-pair encoding; trained, kept in a file."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
