"""Options of a sweep: fields of the recipe with several values each, apart from the command's own options."""

from napkin.errors import NapkinError
from napkin.recipe.recipe import Recipe


def split_axes(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command's own arguments, and the text of each option that names a field of a recipe, as --model.d-model.

    Raises NapkinError for such an option without a value, and for one that is given twice.
    """
    tables = Recipe.__dataclass_fields__
    own: list[str] = []
    axes: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        name, equals, text = argument.partition("=")
        table, dot, _ = name.removeprefix("--").partition(".")
        if not (name.startswith("--") and dot and table in tables):
            own.append(argument)
            continue
        if not equals:
            text = next(rest, "--")
            if text.startswith("--"):
                raise NapkinError(f"{name} has no value: give one, or several with commas between")
        if name.replace("_", "-") in axes:
            raise NapkinError(f"{name} is given twice: name all of its values once, with commas between")
        axes[name.replace("_", "-")] = text
    return own, axes
