"""`napkin tokenizer`: train, encode, compare, show, import, export."""
