"""`napkin data`: a group of commands, one file each; and one for each stage of a pipeline, made from its options."""

from napkin.cli.commands import run_group
from napkin.curation.registry import STAGES

COMMANDS = {
    "run": "make a corpus of raw documents by the stages of a pipeline, or go on with it",
    "recipe": "print a complete pipeline with a comment on each option, to begin with",
    "plan": "predict what a pipeline will leave and take, from a sample of its input",
    "reconcile": "compare a corpus with its plan",
    "why": "tell a document's story: what each stage did to it, or why it was dropped",
    "samples": "write a page with samples of what each stage dropped, beside what remained",
    "chat": "turn conversations into tokens for tuning, and show what is learned of them",
    "train-classifier": "train a classifier of texts on your positives and negatives, for the stage `classifier`",
    "train-languages": "train a language classifier on texts of your own",
    **{name: stage.about for name, stage in STAGES.items()},
}


def main(arguments: list[str]) -> int:
    """Run one of the commands."""
    if arguments and arguments[0] in STAGES:
        from napkin.cli.data.stage_command import run_stage

        run_stage(arguments[0], arguments[1:])
        return 0
    return run_group(__name__, COMMANDS, arguments)


def made_options(command: str) -> type | None:
    """The options of a stage's command; None for a command that has a file."""
    if command not in STAGES:
        return None
    from napkin.cli.data.stage_command import options_class

    return options_class(command)
