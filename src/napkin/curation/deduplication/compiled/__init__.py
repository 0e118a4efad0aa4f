"""The compiled loops of deduplication, in numba. Loading is in loading.py; nothing is imported here."""
