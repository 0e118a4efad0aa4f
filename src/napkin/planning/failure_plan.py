"""What failures are expected to cost a run, and how often it should write checkpoints."""

import dataclasses
import math

from napkin.accounting.failures import failure_model
from napkin.checkpoint.disk_space import checkpoint_bytes
from napkin.planning.checkpoint_plan import whole_checkpoint_bytes, writes_in_background
from napkin.planning.failure_cost import failures_of_run
from napkin.planning.run_plan import Plan
from napkin.planning.site import Site
from napkin.runs.plan_file import PlannedFailures


def planned_failures(plan: Plan) -> PlannedFailures:
    """Failures over all steps of a plan, with a checkpoint every `training.checkpoint_every` steps."""
    site, training = plan.site, plan.recipe.training
    whole = whole_checkpoint_bytes(plan)
    model = failure_model(
        n_devices=site.n_devices,
        copied_bytes=checkpoint_bytes(plan.ledger),
        written_bytes=whole,
        writing_nodes=_writing_nodes(plan),
        host_bandwidth=site.host_bandwidth,
        background=_in_background(plan),
        mtbf_hours=site.mtbf_hours,
        restart_minutes=site.restart_minutes,
    )
    step = plan.seconds_per_step
    interval = min(training.checkpoint_every, plan.steps) * step
    found = failures_of_run(
        model,
        plan.seconds,
        interval_seconds=interval,
        shortest_interval_seconds=step,
        useful_dollars=plan.dollars,
    )
    return dataclasses.replace(
        found,
        interval_steps=training.checkpoint_every,
        best_interval_steps=max(1, round(found.best_interval_seconds / step)),
        longest_interval_steps=max(1, math.floor(found.longest_interval_seconds / step)),
    )


def _writing_nodes(plan: Plan) -> int:
    """Nodes whose ranks write a part of a checkpoint: of replicas, only the first is written."""
    layout = plan.resolved.layout
    if not layout.divides_state:
        return 1
    copies = 1
    if not layout.shard_optimizer:
        # Ranks of context are copies, too, where they are not among those of FSDP2.
        copies = layout.batch_parts // max(layout.shard, layout.expert) * (layout.context if layout.shard == 1 else 1)
    return max(1, _n_nodes(plan.site) // copies)


def _n_nodes(site: Site) -> int:
    return math.ceil(site.n_devices / site.interconnect.devices_per_node) if site.interconnect else 1


def _in_background(plan: Plan) -> bool:
    """Whether checkpoints are written in the background; on other machines if the recipe allows it, since their free
    host memory is not known."""
    writing = plan.recipe.training.checkpoint_writing
    return writes_in_background(plan) if writing == "auto" and plan.site.measured else writing != "wait"
