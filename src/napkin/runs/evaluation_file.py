"""evaluation.json: how well the model, and two general compressors, predict held-out text. The one declaration of it;
`napkin.evaluation` computes it.
"""

from dataclasses import dataclass
from typing import ClassVar

from napkin.runs.plan_file import Natural, NonNegative


@dataclass(frozen=True)
class Evaluation:
    """Bits per byte compares across tokenizers; loss and perplexity do not."""

    UNBOUNDED: ClassVar = ("perplexity",)

    step: Natural
    tokens: Natural
    """Tokens predicted, separators included."""
    bytes: Natural
    """UTF-8 bytes of the text, separators not included."""
    loss: float
    """Nats per token."""
    perplexity: NonNegative
    """exp(loss)."""
    bits_per_byte: NonNegative
    """Nats of all tokens / ln 2 / bytes: separators cost bits and add no bytes."""
    gzip_bits_per_byte: NonNegative
    """Of the same bytes by `gzip -9`."""
    xz_bits_per_byte: NonNegative
    """Of the same bytes by `xz -9`."""
