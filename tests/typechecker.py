"""What holds napkin's functions to their annotations while tests run: beartype, with PEP 484's int as a float."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
