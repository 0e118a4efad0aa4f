"""Warnings for a run that reads the same text too often."""

from napkin.data.batches import Batches

MAX_EPOCHS = 40
"""Four epochs are nearly as good as new text; after about 40, more add nothing (Muennighoff et al. 2023)."""


def repetition_warnings(batches: Batches, steps: int) -> list[str]:
    """A line for each file whose windows occur more than once in a batch, and for each that is read more than
    `MAX_EPOCHS` times in `steps` steps."""
    warnings: list[str] = []
    of_files = zip(batches.tokens.files, batches.windows_of_files, batches.epochs_of_files(steps), strict=True)
    for file, (n_windows, per_batch), epochs in of_files:
        if per_batch > n_windows:
            ways = "use more text"
            if len(batches.tokens.files) == 1:
                ways += f", or --training.batch-size {n_windows} at most"
            warnings.append(
                f"a batch takes {per_batch:,.4g} windows of '{file.path}', which has only {n_windows:,}: the same text "
                f"occurs {per_batch / n_windows:,.1f} times in a batch: {ways}"
            )
        if epochs > MAX_EPOCHS:
            most = int(MAX_EPOCHS * steps / epochs)
            warnings.append(
                f"the run reads '{file.path}' {epochs:,.0f} times: a model learns next to nothing new after about "
                f"{MAX_EPOCHS} epochs, and memorizes the text: use more text"
                + (f", or --training.steps {most} at most" if most else "")
            )
    return warnings
