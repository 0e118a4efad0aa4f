"""A plugin of pytest: how long a generated example takes says more about what else runs than about the code."""

from hypothesis import settings

settings.register_profile("napkin", deadline=None)
settings.load_profile("napkin")
