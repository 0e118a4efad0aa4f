"""A run as a job of a cluster: what the scripts for Slurm and for Kubernetes have in common, checked."""

import shlex
from dataclasses import dataclass

from napkin.errors import NapkinError
from napkin.recipe.layout import layout_of_recipe
from napkin.recipe.layout_check import refuse_impossible_layout
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import per_device

RENDEZVOUS_SECONDS = 600
"""How long a node waits for the others, which may import Python more slowly from a shared disk; torch's default for
the first connection is 60."""
LONGEST_WARNING = 65_535
"""Seconds; Slurm takes no more."""


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """A run on several nodes. Raises NapkinError for what no cluster can do.

    Paths are those on the nodes. All texts are printed in scripts: characters that do not print are refused.
    """

    name: str
    recipe_file: str
    run: str
    nodes: int
    gpus_per_node: int
    """Ranks per node, one for each GPU."""
    uses_gpus: bool = True
    """False for a recipe with training.device = "cpu"."""
    cpus_per_node: int | None = None
    warning_seconds: int = 300
    """How long before its end a job is warned: a step and a checkpoint must fit into it."""
    max_restarts: int = 3
    python: str = "python"

    def __post_init__(self) -> None:
        refuse_unprintable(name=self.name, recipe=self.recipe_file, run=self.run, python=self.python)
        for option, number in (("--nodes", self.nodes), ("--gpus-per-node", self.gpus_per_node)):
            if number < 1:
                raise NapkinError(f"{option} is {number}: a job needs at least 1")
        if self.cpus_per_node is not None and self.cpus_per_node < self.gpus_per_node:
            raise NapkinError(
                f"--cpus-per-node is {self.cpus_per_node}, fewer than the {self.gpus_per_node} processes of a node: "
                "give each at least 1"
            )
        if not 1 <= self.warning_seconds <= LONGEST_WARNING:
            raise NapkinError(f"--warn-before is {self.warning_seconds} seconds: use 1 to {LONGEST_WARNING}")
        if self.max_restarts < 0:
            raise NapkinError(f"--max-restarts is {self.max_restarts}: use 0 or more")

    @property
    def launcher(self) -> list[str]:
        """The command of torchrun on a node, in the words of a shell, up to the rendezvous."""
        # This is torchrun, which then exits with 128 + n after signal n instead of 1. Ranks that have not finished
        # their checkpoint are killed after --shutdown-timeout, torchrun's default being 30 seconds.
        return [
            f"{shlex.quote(self.python)} -m napkin.distributed.launch",
            f"--nproc-per-node {self.gpus_per_node} --max-restarts {self.max_restarts} "
            f"--shutdown-timeout {self.warning_seconds}",
        ]

    @property
    def threads_per_rank(self) -> str:
        """The CPU threads of a rank as an expression of a shell, whose variable `cpus` is those of the node."""
        return f"$((cpus > {self.gpus_per_node} ? cpus / {self.gpus_per_node} : 1))"


def sequences_per_rank(recipe: Recipe, *, nodes: int, gpus_per_node: int) -> int:
    """The rows of a batch that each rank gets.

    Raises NapkinError where the recipe cannot be divided among the ranks as its [parallelism] says.
    """
    layout = layout_of_recipe(recipe, nodes * gpus_per_node)
    rows = per_device(recipe, layout.batch_parts).training.batch_size
    refuse_impossible_layout(recipe, layout)
    return rows


def refuse_unprintable(**texts: str | None) -> None:
    """Raise NapkinError for a text that is empty, or has a character that does not print, such as a line break."""
    for what, text in texts.items():
        if text is not None and not (text and text.isprintable()):
            problem = "has a character that does not print" if text else "is empty"
            raise NapkinError(f"the {what.replace('_', ' ')} '{text}' {problem}, which no script can hold: rename it")
