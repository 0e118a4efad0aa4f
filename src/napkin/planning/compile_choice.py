"""Whether a run compiles its blocks: what that costs and saves, and what prevents it."""

import dataclasses

from napkin.accounting.compile_estimate import CompileEstimate, estimate_compile
from napkin.accounting.ledger import Ledger
from napkin.errors import NapkinError
from napkin.hardware.ceilings import Ceilings
from napkin.planning.run_plan import Plan
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step.compile import missing_compiler
from napkin.units import format_seconds


def choose_compile(
    resolved: ResolvedRecipe, ledger: Ledger, ceilings: Ceilings, *, here: bool = True
) -> CompileEstimate:
    """Whether a resolved recipe's run compiles its blocks, and what that costs and saves.

    With "on" nothing is checked here: `refuse_impossible_compile` is called before planning. `here` is whether the run
    will be on this machine; for another machine only "on" is chosen, where nothing prevents it.
    """
    precision, training = resolved.precision, resolved.recipe.training
    if not here and training.compile != "on":
        return CompileEstimate(why_not="whether it saves time is decided on the machine that trains")
    estimate = estimate_compile(ledger, ceilings, device_type=precision.device_type, precision=precision.name)
    if not here:
        obstacle = compile_obstacle(resolved)
        return dataclasses.replace(estimate, chosen=obstacle is None, why_not=obstacle)
    if training.compile == "off":
        return dataclasses.replace(estimate, why_not="training.compile is off")
    if training.compile == "on":
        return dataclasses.replace(estimate, chosen=True)
    pays, obstacle = estimate.pays(training.steps), compile_obstacle(resolved)
    if pays and obstacle is None:
        obstacle = missing_compiler(precision.device_type)
    return dataclasses.replace(estimate, chosen=pays and obstacle is None, why_not=obstacle)


def refuse_impossible_compile(resolved: ResolvedRecipe) -> None:
    """Raise NapkinError where training.compile is "on" and the recipe or the machine does not allow it."""
    if resolved.recipe.training.compile != "on":
        return
    obstacle = compile_obstacle(resolved) or missing_compiler(resolved.precision.device_type)
    if obstacle is not None:
        raise NapkinError(
            f"training.compile is 'on', but {obstacle}: use --training.compile off, or in the recipe.toml of a run "
            'compile = "off"'
        )


def compile_obstacle(resolved: ResolvedRecipe) -> str | None:
    """What of a resolved recipe prevents that its blocks are compiled; None is nothing."""
    if resolved.recipe.training.kernels in ("compiled", "triton"):
        kernels = resolved.recipe.training.kernels
        return f"training.kernels is '{kernels}', whose operators torch.compile does not see into"
    if resolved.recipe.model.n_experts:
        return "the number of tokens per expert varies from step to step, but compiled code has fixed shapes"
    if resolved.recipe.training.recompute == "selective":
        return "selective recomputation works on single operators, which compiled code fuses"
    if resolved.strategy == "fsdp":
        return "compiled blocks have not been tested with fsdp"
    if resolved.layout.pipeline > 1:
        return "compiled blocks have not been tested in a pipeline"
    if resolved.layout.tensor > 1:
        return "compiled blocks have not been tested with ranks that divide matrices"
    return None


def with_compile_written_out(recipe: Recipe, plan: Plan) -> Recipe:
    """The recipe with the plan's choice written out, so that a resumed run computes the same."""
    training = dataclasses.replace(recipe.training, compile="on" if plan.compile_estimate.chosen else "off")
    return dataclasses.replace(recipe, training=training)


def describe_compile(plan: Plan) -> str:
    """One line on what was chosen and why."""
    found = plan.compile_estimate
    costs = f"costs about {format_seconds(found.seconds)}"
    basis = " (assumed: nothing was measured on such a device)" if found.assumed else ""
    saved = format_seconds(plan.steps * found.saved_per_step)
    if found.chosen:
        in_all = format_seconds(plan.seconds - found.seconds_once + plan.steps * found.seconds_less)
        return f"compiled: saves about {saved} of {in_all}, {costs} once{basis}"
    if found.why_not is not None:
        return f"not compiled: {found.why_not}"
    return f"not compiled: would save about {saved} of {format_seconds(plan.seconds)}, {costs}{basis}"
