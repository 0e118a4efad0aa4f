r"""The general category of every character, by version of Unicode: what `\p{L}` and the like mean to a tokenizer."""
