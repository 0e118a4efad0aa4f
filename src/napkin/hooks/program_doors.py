"""Finding a program to check: by the name of a file, as an object, or as a function that returns a trainer."""

import contextlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from napkin.errors import NapkinError
from napkin.hooks.checked_program import Checked, ModelAndLoss, said_by
from napkin.hooks.checked_trainer import CheckedTrainer


def open_program(program: Any, n_examples: int) -> Checked:
    """The program that a file, a module, an object or a function is. Raises NapkinError for what is none."""
    if hasattr(program, "build") and (hasattr(program, "loss") or hasattr(program, "gradients")):
        opened = program() if inspect.isclass(program) else program
        return ModelAndLoss(opened, n_examples)
    trainer = getattr(program, "trainer", program)
    if callable(trainer) and any(
        each.kind is each.VAR_KEYWORD for each in inspect.signature(trainer).parameters.values()
    ):
        return CheckedTrainer(trainer, n_examples)
    name = getattr(program, "__name__", type(program).__name__)
    raise NapkinError(
        f"'{name}' is not a program to check: give it build() and loss(model, batch), or a function "
        "trainer(**arguments) that returns a Trainer"
    )


def load_program(named: str) -> Any:
    """Return the object that FILE.py or FILE.py:NAME names. Raises NapkinError if there is none."""
    path, colon, name = named.partition(".py:")
    file = Path(f"{path}.py" if colon else named)
    if not file.is_file():
        raise NapkinError(f"there is no file '{file}': name a Python file, as in check.py or check.py:program")
    spec = importlib.util.spec_from_file_location(f"checked_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise NapkinError(f"'{file}' is not a Python file: name one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(file.resolve().parent))
    with said_by(f"'{file}' cannot be imported", file):
        spec.loader.exec_module(module)
    found: Any = module
    for part in name.split(".") if name else ():
        if not hasattr(found, part):
            raise NapkinError(f"'{file}' has no '{part}': name something that it defines")
        found = getattr(found, part)
    return found


def name_of(program: Any) -> str | None:
    """FILE.py:NAME of a program, by which another process can find it; None if it has none."""
    if isinstance(program, str):
        return program
    if inspect.ismodule(program):
        return getattr(program, "__file__", None)
    kind = program if inspect.isclass(program) or inspect.isfunction(program) else None
    with contextlib.suppress(TypeError, OSError):
        if kind is not None and "<locals>" not in kind.__qualname__ and "<lambda>" not in kind.__qualname__:
            return f"{inspect.getfile(kind)}:{kind.__qualname__}"
    return None
