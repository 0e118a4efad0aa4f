"""`napkin data`: a group of commands, and one for each stage of a pipeline, made from its options."""

from functools import partial

from napkin.cli.commands import Command, Group, Main
from napkin.curation.registry import STAGES


def _stage(name: str) -> Main:
    from napkin.cli.data.pipelines import stage_command

    return stage_command(name)


COMMANDS = {
    "run": Command(
        "make a corpus of raw documents by the stages of a pipeline, or continue it", "data.pipelines:run_command"
    ),
    "recipe": Command(
        "print a complete pipeline with a comment on each option, to begin with", "data.pipelines:recipe_command"
    ),
    "plan": Command(
        "predict what a pipeline will keep and cost, from a sample of its input", "data.pipelines:plan_command"
    ),
    "reconcile": Command("compare a corpus with its plan", "data.pipelines:reconcile_command"),
    "banding": Command(
        "say which near-duplicates a threshold, or bands and rows, will find", "data.pipelines:banding_command"
    ),
    "why": Command(
        "tell a document's story: what each stage did to it, or why it was dropped", "data.pipelines:why_command"
    ),
    "samples": Command(
        "write a page with samples of what each stage dropped, beside what remained", "data.pipelines:samples_command"
    ),
    "chat": Command("turn conversations into tokens for tuning, and show which are trained on", "data.chat"),
    "train-classifier": Command(
        "train a classifier of texts on your positives and negatives, for the stage `classifier`",
        "data.classifiers:train_classifier_command",
    ),
    "train-languages": Command(
        "train a language classifier on texts of your own", "data.classifiers:train_languages_command"
    ),
    **{name: Command(stage.about, partial(_stage, name)) for name, stage in STAGES.items()},
}

main = Group("napkin data", COMMANDS)
