"""tiktoken with its own patterns and a vocabulary of ours; nothing is downloaded."""

from functools import cache
from unittest.mock import patch

import tiktoken
from tiktoken_ext import openai_public

from napkin.tokenizer.bpe import BPETokenizer


def tiktoken_encoding(pattern: str, tokenizer: BPETokenizer) -> tiktoken.Encoding:
    """tiktoken's encoding of that name with the ordinary tokens of a tokenizer, which must be distinct."""
    ordinary = tokenizer.vocabulary[: 256 + len(tokenizer.merges)]
    ranks = {token: i for i, token in enumerate(ordinary)}
    assert len(ranks) == len(ordinary)
    return tiktoken.Encoding(pattern, pat_str=published_pattern(pattern), mergeable_ranks=ranks, special_tokens={})


@cache
def published_pattern(pattern: str) -> str:
    if pattern == "gpt2":
        return openai_public.r50k_pat_str
    # The pattern stands in a function that reads the vocabulary too.
    with patch.object(openai_public, "load_tiktoken_bpe", return_value={}):
        return getattr(openai_public, f"{pattern}_base")()["pat_str"]
