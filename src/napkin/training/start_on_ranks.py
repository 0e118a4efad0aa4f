"""Begin a run or take one up with several ranks: the first one checks, plans and makes the folder, the others follow.

A job that torchrun restarts has the same command line as before: `napkin train` then goes on with the run that it has
begun, which it knows by its recipe.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from napkin.accounting.ledger import Ledger
from napkin.accounting.plan import Plan, Site
from napkin.accounting.price import Price
from napkin.data.mixing import TokenMixture
from napkin.data.token_file import TokenFile
from napkin.distributed.ranks import Ranks
from napkin.files import StrPath
from napkin.hardware.host import detect_host
from napkin.planning.preparation import Preparation, Progress, resolve
from napkin.recipe.recipe import Recipe
from napkin.recipe.train_files import paths_and_weights
from napkin.runs.run_folder import FollowedRun, RunFolder
from napkin.training.start import new_run, old_run

Run = tuple[Preparation, RunFolder]


def begin_run(ranks: Ranks, recipe: Recipe, folder: StrPath, *, progress: Progress = lambda doing: None) -> Run:
    """`new_run` with ranks; a job that was restarted goes on with the run of this very recipe, where there is one."""

    def begin() -> Run:
        if ranks.place.attempt and _is_run_of(recipe, Path(folder)):
            return old_run(folder, progress=progress, ranks=ranks)
        return new_run(recipe, folder, progress=progress, ranks=ranks)

    return _together(ranks, folder, begin)


def take_up_run(ranks: Ranks, folder: StrPath, *, progress: Progress = lambda doing: None) -> Run:
    """`old_run` with ranks, as many as there are now."""

    return _together(ranks, folder, lambda: old_run(folder, progress=progress, ranks=ranks))


def _together(ranks: Ranks, folder: StrPath, make: Callable[[], Run]) -> Run:
    made: list[Run] = []
    ranks.from_first(lambda: made.append(make()))
    return made[0] if ranks.is_first else _follow(ranks, folder)


def _follow(ranks: Ranks, folder: StrPath) -> Run:
    """What the first rank has checked and planned, opened and not planned again."""
    run = FollowedRun.open(folder)
    recipe, tokenizer = run.recipe, run.tokenizer

    def opened(path: str) -> TokenFile:
        return TokenFile.open(path, tokenizer_fingerprint=tokenizer.fingerprint, verify=False)

    paths, weights = paths_and_weights(recipe.data.train)
    training = TokenMixture(list(map(opened, paths)), weights)
    validation = None if recipe.data.validation is None else opened(recipe.data.validation)
    recipe, precision = resolve(recipe, tokenizer.vocab_size, detect_host(), ranks)
    plan = _no_plan(recipe)
    return Preparation(recipe, tokenizer, training, validation, precision, plan, ranks), run


def _no_plan(recipe: Recipe) -> Plan:
    return Plan(
        ledger=Ledger((), 0, 0, 0, {}, (), {}),
        price=Price(0.0, 0.0, {}, {}, {}, 1.0),
        site=Site("", 1.0, 0, 0),
        rule_parameters=0,
        rule_bytes_per_parameter=0,
        steps=recipe.training.steps,
        tokens_per_step=recipe.tokens_per_step,
    )


def _is_run_of(recipe: Recipe, folder: Path) -> bool:
    """Whether a folder is the run of this recipe: of what it says, not of what the machine has decided."""
    if not (folder / "recipe.toml").is_file():
        return False
    resolved = RunFolder.open(folder).recipe
    found = dataclasses.asdict(resolved)
    return all(
        value == found[table][name]
        for table, values in dataclasses.asdict(recipe).items()
        for name, value in values.items()
        # What a recipe leaves open, the first attempt has decided, as well as each rank's share of the threads.
        if value not in (None, "auto") and (table, name, value) != ("model", "vocab_size", 0) and name != "threads"
    )
