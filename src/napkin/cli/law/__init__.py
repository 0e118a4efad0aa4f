"""`napkin law`, a group of commands."""

from napkin.cli.commands import Command, Group

COMMANDS = {
    "fit": Command("fit a scaling law to runs, and say how far it can be trusted", "fit:fit"),
    "predict": Command("predict a loss, or the best size and tokens for some FLOPs, with intervals", "predict:predict"),
    "compare": Command("say which law holds: fit on the smaller runs, predict the larger ones", "predict:compare"),
}

main = Group(__name__, COMMANDS)
