"""A run's report, written again when a command has added to what its folder holds."""

from pathlib import Path


def renew_report(run: Path) -> None:
    """Write a run's report.html with what the folder holds by now; best done after the result has been printed."""
    from napkin.report.page import write_report
    from napkin.runs.model_files import is_quantized
    from napkin.runs.run_folder import is_being_trained

    if is_quantized(run):
        return  # It has no training to report.
    write_report(run, training=is_being_trained(run))
