"""Commands that say what a run will take before it starts; `napkin plan` has four forms."""

from collections.abc import Sequence

from napkin.cli.commands import Command
from napkin.cli.common.forms import Form, Forms


class PlanForms(Forms):
    """The forms of `napkin plan`; --within is the time of a plan by rule, unless a recipe is to be trained in it."""

    def chooses(self, option: str, arguments: Sequence[str]) -> bool:
        """Return whether an option chooses its form among these arguments."""
        names_recipe = not arguments[0].startswith("-") or any(
            each.startswith(("--preset", "--model.", "--layout", "--for")) for each in arguments
        )
        return option != "--within" or not names_recipe


plan = PlanForms(
    "plan",
    __name__,
    Command("plan a training run by counting its step", "training"),
    {
        "rule": Form(
            Command("plan by rules of thumb, without a recipe", "rule"),
            ("--params", "--active-params", "--tokens-per-second", "--within"),
        ),
        "layouts": Form(Command("search the layouts of several devices", "layouts")),
        "service": Form(Command("plan a service", "service"), ("--serve",), is_name=True),
    },
)
