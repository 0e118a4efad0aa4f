"""torch.compile where it pays: the code of one block, compiled once, serves all layers (regional compilation).

Compiling the whole model gains no more and takes longer. Head, loss and update stay as they are, and so does a pass
without gradients: evaluations have batches of another size, and are few. The step is counted as it runs uncompiled.
"""

import dataclasses
import os
import subprocess
import sysconfig
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from napkin.accounting.compile_estimate import Compiling, reckon
from napkin.accounting.ledger import Ledger
from napkin.accounting.plan import Plan
from napkin.errors import NapkinError
from napkin.hardware.ceilings import Ceilings
from napkin.model.transformer import Transformer
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.torch_compile import set_up_compiler
from napkin.units import format_seconds


class CompiledBlocks:
    """What calls a block: the compiled form of `run`, or `run` itself where no gradient is wanted."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        set_up_compiler()
        self.run = run
        self.compiled = torch.compile(run, dynamic=False)

    def __call__(self, *arguments: Any) -> Tensor:
        """Run the block."""
        return (self.compiled if torch.is_grad_enabled() else self.run)(*arguments)


def compile_blocks(model: Transformer) -> None:
    """Let `model` compile the code of its blocks, at their first call with gradients."""
    model.run_block = CompiledBlocks(model.run_block)


def choose_compiling(
    recipe: Recipe, precision: Precision, ledger: Ledger, ceilings: Ceilings, *, n_ranks: int = 1
) -> Compiling:
    """Whether the run of a resolved recipe compiles its blocks, and what that costs and saves.

    "on" is taken at its word: `refuse_impossible_compiling` comes before any plan.
    """
    reckoned = reckon(ledger, ceilings, device_type=precision.device_type, precision=precision.name)
    if recipe.training.compile == "off":
        return dataclasses.replace(reckoned, why_not="training.compile is off")
    if recipe.training.compile == "on":
        return dataclasses.replace(reckoned, chosen=True)
    pays, obstacle = reckoned.pays(recipe.training.steps), _obstacle(recipe, n_ranks)
    if pays and obstacle is None:
        obstacle = missing_compiler(precision.device_type)
    return dataclasses.replace(reckoned, chosen=pays and obstacle is None, why_not=obstacle)


def refuse_impossible_compiling(recipe: Recipe, precision: Precision, *, n_ranks: int = 1) -> None:
    """Raise NapkinError where training.compile is "on" and what the recipe asks for, or the machine, does not allow
    it."""
    if recipe.training.compile != "on":
        return
    obstacle = _obstacle(recipe, n_ranks) or missing_compiler(precision.device_type)
    if obstacle is not None:
        raise NapkinError(
            f"training.compile is 'on', but {obstacle}: use --training.compile off, or in the recipe.toml of a run "
            'compile = "off"'
        )


def _obstacle(recipe: Recipe, n_ranks: int) -> str | None:
    if recipe.model.n_experts:
        return "how many tokens an expert gets differs from step to step, and compiled code has fixed shapes"
    if recipe.training.recompute == "selective":
        return "selective recomputation looks at operators one by one, and compiled code has none"
    if n_ranks > 1 and recipe.training.parallelism == "fsdp":
        return "compiled blocks whose parameters are gathered by fsdp have not been proven"
    return None


def missing_compiler(device_type: str) -> str | None:
    """What this machine lacks of what torch.compile needs; None where it is all there."""
    if device_type != "cpu":
        return None if _has_triton() else "there is no Triton, which writes a GPU's code: pip install triton"
    set_up_compiler()
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        compiler = get_cpp_compiler()
    except (InvalidCxxCompiler, OSError, RuntimeError):
        return f"there is no C++ compiler ({os.environ.get('CXX', 'g++')}), which it needs on a CPU"
    if os.name == "nt":
        return None
    headers = sysconfig.get_paths()["include"]
    # What torch generates begins so.
    command = [compiler, "-x", "c++", "-fsyntax-only", f"-I{headers}", "-"]
    try:
        tried = subprocess.run(command, input=b"#include <Python.h>\n#include <vector>\n", capture_output=True)
    except OSError as error:
        return f"the C++ compiler {compiler}, which it needs on a CPU, does not run ({error.strerror})"
    if tried.returncode:
        return f"the C++ compiler {compiler} lacks the headers of Python in {headers} or those of C++"
    return None


def _has_triton() -> bool:
    from torch.utils._triton import has_triton

    return has_triton()


def written_out(recipe: Recipe, plan: Plan) -> Recipe:
    """The recipe with what its training.compile came to, so that a run which goes on later computes the same."""
    training = dataclasses.replace(recipe.training, compile="on" if plan.compiling.chosen else "off")
    return dataclasses.replace(recipe, training=training)


def describe_compiling(plan: Plan) -> str:
    """What was chosen and why, in a line."""
    found = plan.compiling
    costs = f"costs about {format_seconds(found.seconds)}"
    basis = " (assumed: nothing was measured on such a device)" if found.assumed else ""
    saved = format_seconds(plan.steps * found.saved_per_step)
    if found.chosen:
        in_all = format_seconds(plan.seconds - found.seconds_once + plan.steps * found.seconds_less)
        return f"compiled: saves about {saved} of {in_all}, {costs} once{basis}"
    if found.why_not is not None:
        return f"not compiled: {found.why_not}"
    return f"not compiled: would save about {saved} of {format_seconds(plan.seconds)}, {costs}{basis}"
