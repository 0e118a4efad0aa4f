"""The choices of a plan where the recipe leaves them open: the forms of operators, of attention and of the optimizer
update; whether blocks are compiled; and Triton's kernels, where they run and the plan is faster with them.
"""

import dataclasses
import warnings
from collections.abc import Callable

from napkin.accounting.ledger import Ledger
from napkin.accounting.pricing import CompileEstimate, estimate_compile, price
from napkin.errors import NapkinError
from napkin.hardware.ceilings import Ceilings
from napkin.model.config import AttentionImplementation, ModelConfig
from napkin.model.config_checks import WIDEST_FLASH_HEAD
from napkin.model.kernel_forms import is_worth_compiling
from napkin.optim.registry import optimizer_entry
from napkin.planning.step.block_timing import fastest_blocks, time_head
from napkin.planning.step.machine import Machine, Progress
from napkin.planning.step.run_plan import Plan
from napkin.planning.step.site import fits
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import ParallelismConfig
from napkin.train_step.compile import missing_compiler
from napkin.train_step.step_graph import graph_obstacle
from napkin.train_step.step_ledger import count_step
from napkin.units import format_seconds

MOST_SCORES = 16
"""Scores of a head per number of a query, up to which plain attention is tried: it keeps them all for the backward
pass, and with as many they take as much memory as the other activations of a block."""


def choose_kernels(
    recipe: Recipe,
    precision: Precision,
    machine: Machine | None = None,
    *,
    progress: Progress = lambda doing: None,
) -> Recipe:
    """The recipe with the forms of its kernels and attention written out.

    On a CPU of this machine, for runs of more than some seconds, kernels and attention are those that are fastest by
    timing, see block_timing.py; for other machines, shorter runs, and without a machine they are torch's.
    """
    optimizer = recipe.optimizer
    if optimizer.fused is None:
        optimizer = dataclasses.replace(optimizer, fused=optimizer_entry(optimizer.name).fused)
    recipe = dataclasses.replace(recipe, optimizer=optimizer)
    candidates = candidates_of(recipe, precision)
    if machine is None or not machine.measured or not _is_long(recipe):
        return candidates[0]
    if recipe.training.threads is not None:
        # A choice holds for the threads that train.
        machine.prepare(recipe.training)
    chosen = fastest_blocks(candidates, precision, progress)
    if chosen.training.kernels == "compiled" and (precision.device_type, precision.products) == ("cpu", "bf16"):
        time_head(chosen.model, progress)
    return chosen


def candidates_of(recipe: Recipe, precision: Precision) -> list[Recipe]:
    """The recipe with each form of kernels and of attention that it leaves open and that suits it, torch's first."""
    training, chooses = recipe.training, recipe.model.attention == "auto"
    # In fp32, torch.compile fuses the operators between the products, where that pays.
    suits = precision.device_type == "cpu" and precision.products == "bf16" and training.compile != "on"
    kernels = ["plain", *(["compiled"] if suits else [])] if training.kernels == "auto" else [training.kernels]
    return [
        dataclasses.replace(
            recipe,
            model=dataclasses.replace(recipe.model, attention=attention),
            training=dataclasses.replace(training, kernels=each),
        )
        for each in kernels
        for attention in (_attentions(recipe, precision, each) if chooses else [recipe.model.attention])
    ]


def _attentions(recipe: Recipe, precision: Precision, kernels: str) -> list[AttentionImplementation]:
    model = recipe.model
    forms: list[AttentionImplementation] = [model.resolved_attention]
    if precision.device_type != "cpu" or recipe.parallelism.context > 1:
        return forms
    if forms != ["plain"] and model.context_length <= MOST_SCORES * model.resolved_head_dim:
        forms.append("plain")
    if kernels == "compiled" and model.positions != "alibi":
        forms.append("compiled")
    return forms


def _is_long(recipe: Recipe) -> bool:
    """True if the run takes so long that compiled kernels may save more time than they cost."""
    tokens = recipe.training.steps * recipe.training.batch_size * recipe.model.context_length
    return is_worth_compiling(recipe.model, tokens, trained=True)


def choose_compile(
    resolved: ResolvedRecipe, ledger: Ledger, ceilings: Ceilings, *, here: bool = True
) -> CompileEstimate:
    """Decide if a resolved recipe's run compiles its blocks, and estimate what that costs and saves.

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
    """The part of a resolved recipe that prevents compilation of its blocks; None if nothing does."""
    training, layout = resolved.recipe.training, resolved.layout
    if training.kernels in ("compiled", "triton"):
        return f"training.kernels is '{training.kernels}', whose operators torch.compile does not see into"
    if resolved.recipe.model.n_experts:
        return "the number of tokens per expert varies from step to step, but compiled code has fixed shapes"
    if resolved.recipe.model.kv_sharing > 1:
        return "layers that share keys and values pass them on beside the residual stream, which compiled code cannot"
    if training.recompute == "selective":
        return "selective recomputation works on single operators, which compiled code fuses"
    untested = {
        "with fsdp": resolved.strategy == "fsdp",
        "in a pipeline": layout.pipeline > 1,
        "with ranks that divide matrices": layout.tensor > 1,
    }
    return next((f"compiled blocks have not been tested {how}" for how, is_so in untested.items() if is_so), None)


LAUNCH_SECONDS = 5e-6
"""Seconds in which a host launches an operator of an uncompiled step: Python, autograd and torch's dispatcher take 5 to
10 microseconds for an operator of torch on a current processor, and more for those of napkin."""


def graph_bytes(plan: Plan, *, here: bool) -> int:
    """Bytes of the CUDA graph of a run's micro-batches, 0 where none is recorded.

    Where the recipe leaves it open there is one if launching takes longer than computing, and if it fits beside steps
    without a graph: the first ones, and evaluations. `here` is whether the run will be on this machine; for another one
    the plan cannot know how fast its host is.
    """
    chosen, memory = plan.recipe.training.cuda_graphs, plan.memory
    if chosen == "off" or (chosen == "auto" and not here) or graph_obstacle(plan.resolved) is not None:
        return 0
    pool = max(memory.peak_bytes - memory.resident_bytes, 1)
    if chosen == "auto":
        launched = sum(row.phase != "optimizer" for row in memory.rows) * LAUNCH_SECONDS
        if launched < plan.seconds_per_step or not fits(plan.peak_bytes + pool, plan.site.memory_bytes):
            return 0
    return pool


def refuse_impossible_graph(resolved: ResolvedRecipe) -> None:
    """Raise NapkinError where training.cuda_graphs is "on" and the recipe does not allow it."""
    if resolved.recipe.training.cuda_graphs == "on" and (obstacle := graph_obstacle(resolved)) is not None:
        raise NapkinError(
            f"training.cuda_graphs is 'on', but {obstacle}: use --training.cuda-graphs off, or in the recipe.toml of a "
            'run cuda_graphs = "off"'
        )


def describe_compile(plan: Plan) -> str:
    """One line on the choice and its reason."""
    estimate = plan.compile_estimate
    costs = f"costs about {format_seconds(estimate.seconds)}"
    basis = " (assumed: nothing was measured on such a device)" if estimate.assumed else ""
    saved = format_seconds(plan.steps * estimate.saved_per_step)
    if estimate.chosen:
        in_all = format_seconds(plan.seconds - estimate.seconds_once + plan.steps * estimate.seconds_less)
        return f"compiled: saves about {saved} of {in_all}, {costs} once{basis}"
    if estimate.why_not is not None:
        return f"not compiled: {estimate.why_not}"
    return f"not compiled: would save about {saved} of {format_seconds(plan.seconds)}, {costs}{basis}"


LAYERS = 2
"""Layers of the model whose step is priced with either form of its kernels; all layers are alike."""


def with_kernels_that_run(recipe: Recipe, machine: Machine) -> Recipe:
    """The recipe with plain kernels, and a warning, where it names Triton's and the machine does not run them."""
    if recipe.training.kernels != "triton" or (obstacle := machine.triton_obstacle()) is None:
        return recipe
    warnings.warn(f"training.kernels is 'triton', but {obstacle}; 'plain' is taken instead", stacklevel=2)
    return dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, kernels="plain"))


def choose_triton(recipe: Recipe, precision: Precision, machine: Machine) -> Recipe:
    """The recipe for a GPU with the form of kernels and of attention written out whose step is planned to be fastest.

    Only what the recipe leaves open is chosen. Kernels are chosen for GPUs of this machine: for others a plan cannot
    know whether Triton is there. Where torch.compile would fuse the blocks, Triton's kernels have to be faster than
    that.
    """
    kernels, is_open = recipe.training.kernels, recipe.training.kernels == "auto"
    if precision.device_type != "cuda" or kernels not in ("auto", "triton"):
        return recipe
    if is_open and (not machine.measured or recipe.training.compile == "on" or machine.triton_obstacle() is not None):
        return recipe
    usual, model = recipe.model.resolved_attention, recipe.model
    chooses = model.attention == "auto" and recipe.parallelism.context == 1 and suits_flash(model)
    forms = [("plain", usual)] if is_open else []
    forms += [("triton", attention) for attention in ((usual, "flash") if chooses else (usual,))]
    candidates = [
        dataclasses.replace(
            recipe,
            model=dataclasses.replace(model, attention=attention),
            training=dataclasses.replace(recipe.training, kernels=kernels),
        )
        for kernels, attention in forms
    ]
    return fastest(candidates, lambda candidate: planned_seconds(candidate, precision, machine))


def fastest(candidates: list[Recipe], seconds_of: Callable[[Recipe], float]) -> Recipe:
    """The recipe of the fewest seconds, the first of those that are equally fast."""
    return candidates[0] if len(candidates) == 1 else min(candidates, key=seconds_of)


def planned_seconds(recipe: Recipe, precision: Precision, machine: Machine) -> float:
    """Seconds of one micro-batch through a few layers and the loss, and of the update, by rooflines."""
    training = recipe.training
    size = 1 if training.micro_batch_size == "auto" else training.resolved_micro_batch_size
    small = dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, n_layers=min(recipe.model.n_layers, LAYERS)),
        training=dataclasses.replace(training, batch_size=size, micro_batch_size=size, recompute_every=1),
        parallelism=ParallelismConfig(),
    )
    resolved, ceilings = ResolvedRecipe(small, precision, machine.target), machine.ceilings(precision)
    ledger = count_step(resolved)
    seconds = price(ledger, ceilings).seconds
    if training.compile != "off" and compile_obstacle(resolved) is None:
        names = {"device_type": precision.device_type, "precision": precision.name}
        seconds -= estimate_compile(ledger, ceilings, **names).saved_per_step
    return seconds


def suits_flash(model: ModelConfig) -> bool:
    """True if flash attention has a form for a model."""
    return model.positions != "alibi" and model.resolved_head_dim <= WIDEST_FLASH_HEAD
