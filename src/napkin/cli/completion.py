"""`napkin completion`: a script that completes commands, options and their choices in a shell.

It is made from the same declarations as the help, so a new option is completed as soon as it exists. All words are in
the script: no Python starts at a keystroke.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Annotated, Literal

import tyro

from napkin.cli.commands import Forms, Group, options_of
from napkin.cli.common.options import command, option_choices
from napkin.cli.common.recipe_options import RecipeOptions
from napkin.cli.common.terminal import print_verbatim
from napkin.model.config import presets

TAKES_AXES = ("sweep",)
"""Commands whose options are also the fields of a recipe, each with several values."""


@dataclass(frozen=True)
class CompletionOptions:
    """Print a script for a shell that completes commands, options and their choices; docs/install.md says where it
    goes. File names are completed everywhere else."""

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]
    """The shell."""


@command("completion", CompletionOptions)
def main(options: CompletionOptions) -> None:
    script = {"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell]
    print_verbatim("\n".join(script(words_of_commands())))


def words_of_commands() -> dict[str, dict[str, tuple[str, ...]]]:
    """For each command, "tokenizer train" for one: its options with their choices; of a group, its commands."""
    from napkin.cli import ALL

    return dict(_of_group(ALL))


def _of_group(group: Group) -> Iterator[tuple[str, dict[str, tuple[str, ...]]]]:
    prefix = group.typed.removeprefix("napkin").strip()
    yield prefix, dict.fromkeys((*group.commands, "--help", *(() if prefix else ("--version",))), ())
    for name, each in group.commands.items():
        main = each.load()
        if isinstance(main, Group):
            yield from _of_group(main)
            continue
        words: dict[str, tuple[str, ...]] = {"--help": ()}
        if isinstance(main, Forms):
            words |= dict.fromkeys(_form_words(main), ())
        if name in TAKES_AXES:
            # Values with commas between have no choices to complete, and no option a --no- form.
            fields = (option for option in option_choices(RecipeOptions) if "." in option and ".no-" not in option)
            words |= {f"--{field}": () for field in fields}
        for options in options_of(main):
            words |= {
                f"--{option}": choices or _names_of(option) for option, choices in option_choices(options).items()
            }
        yield f"{prefix} {name}".strip(), words


def _form_words(forms: Forms) -> Iterator[str]:
    """Yield the names of a command's forms, and the options that stand for a name."""
    for name, form in forms.others.items():
        yield name
        if form.is_name:
            yield from (choice for choice in form.chosen_by if choice.startswith("--") and "=" not in choice)


def _names_of(option: str) -> tuple[str, ...]:
    """Names that the package has for an option that takes files or other names too."""
    if option == "preset":
        return tuple(presets())
    if option == "stack":
        # Only the names of files are looked at: reading the files would import torch.
        folder = resources.files("napkin.planning.layouts") / "stacks"
        return tuple(sorted(file.name.removesuffix(".toml") for file in folder.iterdir()))
    return ()


def _bash(words: dict[str, dict[str, tuple[str, ...]]]) -> Iterator[str]:
    groups = [name for name in words if name and any(other.startswith(f"{name} ") for other in words)]
    yield "# bash completion of napkin"
    yield "_napkin() {"
    yield "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command="
    # "=" is a word of its own in bash: --option=VALUE is completed like --option VALUE.
    yield '    [[ $word == "=" ]] && word='
    yield '    [[ $before == "=" ]] && before=${COMP_WORDS[COMP_CWORD-2]}'
    yield "    (( COMP_CWORD > 1 )) && command=${COMP_WORDS[1]}"
    yield f"    case $command in {'|'.join(groups)})"
    yield '        (( COMP_CWORD > 2 )) && command="$command ${COMP_WORDS[2]}";;'
    yield "    esac"
    yield '    case "$command $before" in'
    for typed, options in words.items():
        for option, choices in options.items():
            if choices:
                reply = _compgen(choices)
                yield f'        "{typed} {option}") {reply}; return;;'
    yield "    esac"
    yield '    case "$command" in'
    for typed, options in words.items():
        yield f'        "{typed}") {_compgen(options)};;'
    # Where no word fits, `-o default` completes file names.
    yield from ("    esac", "}", "complete -o default -F _napkin napkin")


def _compgen(words: Iterable[str]) -> str:
    return f'COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word"))'


def _zsh(words: dict[str, dict[str, tuple[str, ...]]]) -> Iterator[str]:
    yield from ("#compdef napkin", "# zsh completion of napkin, by its completion for bash")
    yield "autoload -U +X bashcompinit && bashcompinit"
    yield from _bash(words)


def _fish(words: dict[str, dict[str, tuple[str, ...]]]) -> Iterator[str]:
    yield "# fish completion of napkin"
    for typed, options in words.items():
        words_typed = typed.split()
        # The words before the cursor have to be exactly these.
        has = [f'test (commandline -opc)[{number}] = "{word}"' for number, word in enumerate(words_typed, start=2)]
        here = "; and ".join([f"test (count (commandline -opc)) -ge {len(words_typed) + 1}", *has])
        for option, choices in options.items():
            if not option.startswith("--"):
                only = f"test (count (commandline -opc)) -eq {len(words_typed) + 1}"
                yield f"complete -c napkin -n '{'; and '.join([only, *has])}' -f -a {option}"
            elif choices:
                yield f"complete -c napkin -n '{here}' -l {option[2:]} -x -a '{' '.join(choices)}'"
            else:
                yield f"complete -c napkin -n '{here}' -l {option[2:]}"
