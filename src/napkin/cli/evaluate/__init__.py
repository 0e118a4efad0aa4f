"""`napkin evaluate`, which has four forms, and `napkin contamination`."""

from napkin.cli.commands import Command
from napkin.cli.common.forms import Form, Forms

evaluate = Forms(
    "evaluate",
    __name__,
    Command("predict all validation tokens of a run", "text:evaluate_tokens"),
    {
        "text": Form(
            Command("estimate bits per byte from a sample of a text", "text:evaluate_text"),
            ("--text", "--stride", "--error", "--max-tokens"),
        ),
        "task": Form(Command("put the questions of a task to a model", "tasks:evaluate_task"), ("--task",)),
        "compare": Form(Command("compare two results item by item", "compare"), ("--compare",), is_name=True),
    },
)
