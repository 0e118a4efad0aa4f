"""The compiled core of extraction, in numba: a page as tables of its elements and blocks, and the choice among them."""
