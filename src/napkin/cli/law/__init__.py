"""`napkin law`: a group of commands, one file each."""

from napkin.cli.commands import run_group

COMMANDS = {
    "fit": "fit a scaling law to runs, and say how far it can be trusted",
    "predict": "predict a loss, or the best size and tokens for some FLOPs, with intervals",
    "compare": "say which law holds: fit on the smaller runs, predict the larger ones",
}


def main(arguments: list[str]) -> int:
    """Run one of the commands."""
    return run_group(__name__, COMMANDS, arguments)
