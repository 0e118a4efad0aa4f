"""Whole blocks of a model in one compiled pass, for one new token of each sequence."""
