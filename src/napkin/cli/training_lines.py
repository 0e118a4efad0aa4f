"""What training prints of its losses: the line after each step, and the summary at the end."""

from pathlib import Path

from napkin.data.mixing import TokenMixture
from napkin.runs.metrics import METRICS_FILE, StepMetrics, read_metrics_record
from napkin.units import format_bytes, format_count, format_three_digits


class TrainingLines:
    """The lines of a run; `of_step` is called after each step."""

    def __init__(self, run: Path, *, steps: int, tokens_per_step: int, train_tokens: TokenMixture) -> None:
        self.steps, self._tokens_per_step, self._train_tokens = steps, tokens_per_step, train_tokens
        self._is_first = True
        # A resumed run was evaluated before.
        self._evaluated = {
            logged.step: logged.validation_loss
            for logged in read_metrics_record(run / METRICS_FILE).metrics
            if logged.validation_loss is not None
        }

    def of_step(self, metrics: StepMetrics) -> str:
        """The live line; what matters most comes first, because a narrow terminal cuts off the rest."""
        self._remember(metrics)
        mark = f" (spike, {metrics.spike:.0f}σ)" if metrics.spike is not None else ""
        parts = [f"step {metrics.step}/{self.steps}", f"loss {metrics.loss:.3f}{mark}"]
        if self._evaluated:
            last = max(self._evaluated)
            parts.append(f"val {self._evaluated[last]:.3f}@{last}")
        return "  ".join(
            [
                *parts,
                f"{self._epochs(metrics.tokens)} epochs",
                f"{format_count(metrics.tokens_per_second)} tok/s",
                f"MFU {metrics.mfu:.0%}",
                format_bytes(metrics.bytes),
            ]
        )

    def trained(self, step: int) -> str:
        """Steps, tokens and epochs up to `step`."""
        tokens, text = step * self._tokens_per_step, format_count(self._train_tokens.n_tokens)
        return f"{step:,} steps, {format_count(tokens)} tokens, {self._epochs(tokens)} epochs of {text} tokens"

    def validation(self) -> str | None:
        """The last validation loss and the lowest one; None where there was no evaluation."""
        if not self._evaluated:
            return None
        last, best = max(self._evaluated), min(self._evaluated, key=lambda step: (self._evaluated[step], step))
        found = f"validation loss {self._evaluated[last]:.4f} at step {last:,}"
        if best == last:
            return f"{found}, the lowest" if len(self._evaluated) > 1 else found
        return f"{found}; the lowest was {self._evaluated[best]:.4f} at step {best:,}"

    def as_json(self, step: int) -> dict[str, float | None]:
        """Epochs and validation losses for programs."""
        return {
            "epochs": self._train_tokens.epochs(step * self._tokens_per_step),
            "validation_loss": self._evaluated[max(self._evaluated)] if self._evaluated else None,
            "lowest_validation_loss": min(self._evaluated.values(), default=None),
        }

    def _epochs(self, tokens: int) -> str:
        return format_three_digits(self._train_tokens.epochs(tokens))

    def _remember(self, metrics: StepMetrics) -> None:
        if self._is_first:
            # The file may hold evaluations of steps that are repeated.
            self._evaluated = {step: loss for step, loss in self._evaluated.items() if step < metrics.step}
            self._is_first = False
        if metrics.validation_loss is not None:
            self._evaluated[metrics.step] = metrics.validation_loss
