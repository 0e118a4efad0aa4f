"""Begin a run, or take one up again: files checked, step planned, plan written down, nothing trained yet."""

import dataclasses
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch

import napkin
from napkin.accounting.plan import Plan
from napkin.accounting.price import Spent
from napkin.checkpoint.disk_space import checkpoint_bytes, refuse_too_small_disk
from napkin.distributed.ranks import ALONE, Ranks
from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.hardware.host import Host, detect_host
from napkin.planning.micro_batch import refuse_what_does_not_fit
from napkin.planning.preparation import Preparation, Progress, make_plan, prepare, resolve
from napkin.recipe.per_device import share_of
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.runs.run_folder import RunFolder
from napkin.tokenizer.tokenizer_file import load_tokenizer
from napkin.train_step.compile import describe_compiling, written_out


def new_run(
    recipe: Recipe, folder: StrPath, *, progress: Progress = lambda doing: None, ranks: Ranks = ALONE
) -> tuple[Preparation, RunFolder]:
    """Check and plan a recipe, make its run folder and write plan.json.

    Raises NapkinError where the folder exists, the files do not belong together or the step does not fit; nothing is
    left behind then.
    """
    RunFolder.refuse_existing(folder)
    preparation = _checked(prepare(recipe, progress=progress, ranks=ranks))
    refuse_too_small_disk(Path(folder), preparation.plan)
    run = RunFolder.create(folder, preparation.recipe, preparation.tokenizer)
    run.write_json("plan.json", plan_as_dict(preparation.plan, preparation.precision))
    return preparation, run


def old_run(
    folder: StrPath, *, progress: Progress = lambda doing: None, ranks: Ranks = ALONE
) -> tuple[Preparation, RunFolder]:
    """Open a run folder and plan what it holds; `train` goes on from its newest good checkpoint."""
    run = RunFolder.open(folder)
    recipe = run.recipe
    if recipe.training.compile == "auto":
        # Begun before there was a choice: it goes on as it began.
        recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, compile="off"))
    return _checked(prepare(recipe, tokenizer=run.tokenizer, progress=progress, ranks=ranks)), run


def plan_only(recipe: Recipe, *, progress: Progress = lambda doing: None) -> tuple[Recipe, Precision, Plan]:
    """Plan a recipe without its token files; where it gives model.vocab_size, without its tokenizer too."""
    recipe, precision, host = resolve_alone(recipe)
    plan = make_plan(recipe, precision, host, progress)
    return written_out(recipe, plan), precision, plan


def resolve_alone(recipe: Recipe) -> tuple[Recipe, Precision, Host]:
    """Resolve a recipe without its token files; where it gives model.vocab_size, without its tokenizer too."""
    host = detect_host()
    recipe, precision = resolve(recipe, vocab_size_of(recipe), host)
    return recipe, precision, host


def vocab_size_of(recipe: Recipe) -> int:
    """The recipe's model.vocab_size or, where it is left open, its tokenizer's."""
    if recipe.model.vocab_size:
        return recipe.model.vocab_size
    if not Path(recipe.data.tokenizer).is_file():
        raise NapkinError(
            f"there is no tokenizer file '{recipe.data.tokenizer}', so the vocabulary is unknown: "
            "give its size with --model.vocab-size, or a tokenizer with --data.tokenizer"
        )
    return load_tokenizer(recipe.data.tokenizer).vocab_size


def plan_as_dict(plan: Plan, precision: Precision) -> dict[str, Any]:
    """A plan as plan.json holds it; bytes, FLOPs and seconds are never scaled."""
    return {
        "napkin": napkin.__version__,
        "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": {
            "name": plan.site.name,
            "kind": precision.device_type,
            "matmul_peak": plan.site.matmul_peak,
            "format": precision.products,
            "precision": precision.name,
            "memory_bytes": plan.site.memory_bytes,
        },
        "formats": {usage.what: usage.format for usage in precision.usage()},
        "steps": plan.steps,
        "tokens_per_step": plan.tokens_per_step,
        "fits": plan.fits,
        "seconds": plan.seconds,
        "checkpoint_bytes": checkpoint_bytes(plan.ledger),
        "peak_by_category": plan.ledger.peak_by_category,
        "flops_by_phase": plan.ledger.flops_by("phase"),
        "seconds_factor": plan.price.factor,
        "dollars": plan.dollars,
        "kilowatt_hours": plan.kilowatt_hours,
        "seconds_by_phase": _seconds(plan.price.by_phase),
        "seconds_by_operator": _seconds(plan.price.by_operator),
        "byte_bound_by_operator": _byte_bound_seconds(plan.price.by_operator),
        "seconds_by_module": _seconds(plan.price.by_module),
        "byte_bound_by_module": _byte_bound_seconds(plan.price.by_module),
        "compile": {**dataclasses.asdict(plan.compiling), "says": describe_compiling(plan)},
        "unknown_operators": plan.ledger.unknown_operators,
        "table": msgspec.to_builtins(plan.table()),
    }


def _seconds(spent: dict[str, Spent]) -> dict[str, float]:
    return {name: each.seconds for name, each in spent.items()}


def _byte_bound_seconds(spent: dict[str, Spent]) -> dict[str, float]:
    return {name: each.byte_bound_seconds for name, each in spent.items()}


def _checked(preparation: Preparation) -> Preparation:
    share = share_of(preparation.recipe, preparation.ranks.size)
    refuse_what_does_not_fit(share, preparation.precision, preparation.plan)
    return preparation
