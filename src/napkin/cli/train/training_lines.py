"""What training prints of its losses: the line after each step, and the summary at the end."""

import math
from pathlib import Path

from napkin.data.mixing import TokenMixture
from napkin.runs.metrics import METRICS_FILE, StepMetrics, read_metrics_record
from napkin.units import format_bytes, format_count, format_three_digits


class TrainingLines:
    """The lines of a run of any kind; `of_step` is called after each step."""

    def __init__(self, run: Path, *, steps: int) -> None:
        self.steps = steps
        self._last: StepMetrics | None = None
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
        parts += self._shown(metrics)
        if (epochs := self._epochs(metrics)) is not None:
            parts.append(f"{format_three_digits(epochs)} epochs")
        parts.append(f"{format_count(metrics.tokens_per_second)} tok/s")
        if not math.isnan(metrics.mfu):
            parts.append(f"MFU {metrics.mfu:.0%}")
        return "  ".join([*parts, format_bytes(metrics.bytes)])

    def _shown(self, metrics: StepMetrics) -> list[str]:
        """Figures of the kind of training that the line shows."""
        return []

    def _epochs(self, metrics: StepMetrics) -> float | None:
        return metrics.epochs

    def trained(self, step: int) -> str:
        """Steps, tokens and epochs up to `step`, the last one of this process."""
        if self._last is None:
            return f"{step:,} steps"
        epochs = "" if self._last.epochs is None else f", {format_three_digits(self._last.epochs)} epochs"
        return f"{step:,} steps, {format_count(self._last.tokens)} tokens{epochs}"

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
            "epochs": None if self._last is None else self._last.epochs,
            "validation_loss": self._evaluated[max(self._evaluated)] if self._evaluated else None,
            "lowest_validation_loss": min(self._evaluated.values(), default=None),
        }

    def _remember(self, metrics: StepMetrics) -> None:
        if self._last is None:
            # The file may hold evaluations of steps that are repeated.
            self._evaluated = {step: loss for step, loss in self._evaluated.items() if step < metrics.step}
        self._last = metrics
        if metrics.validation_loss is not None:
            self._evaluated[metrics.step] = metrics.validation_loss


class PretrainingLines(TrainingLines):
    """Those of pre-training, whose tokens follow from the number of steps."""

    def __init__(self, run: Path, *, steps: int, tokens_per_step: int, train_tokens: TokenMixture) -> None:
        super().__init__(run, steps=steps)
        self._tokens_per_step, self._train_tokens = tokens_per_step, train_tokens

    def _epochs(self, metrics: StepMetrics) -> float | None:
        return self._train_tokens.epochs(metrics.tokens)

    def trained(self, step: int) -> str:
        """Steps, tokens and epochs up to `step`."""
        tokens, text = step * self._tokens_per_step, format_count(self._train_tokens.n_tokens)
        epochs = format_three_digits(self._train_tokens.epochs(tokens))
        return f"{step:,} steps, {format_count(tokens)} tokens, {epochs} epochs of {text} tokens"

    def as_json(self, step: int) -> dict[str, float | None]:
        """Also where this process has made no step."""
        return {**super().as_json(step), "epochs": self._train_tokens.epochs(step * self._tokens_per_step)}
