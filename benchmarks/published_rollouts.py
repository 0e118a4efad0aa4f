"""Seconds of published steps of reinforcement learning: answers are generated, scored by two models, and trained on.

    python benchmarks/published_rollouts.py

A second table has steps of full fine-tuning of packed sequences (torchtune), planned as torchtitan's. Adapters have no
plan on a cluster, and published rows with them are left out.

Nothing is fitted to these rows, and no constant of what they are made of is: the server's are those of
service_efficiency.toml, training's those of its stack. Of a step are planned

- generation: all prompts at once on the replicas of a vLLM server, each with its part. Published is the mean length of
  answers and the longest that is allowed; lengths are drawn as if an answer were as likely to end after each token. The
  step waits for the replica that is last, and that for its longest answer.
- scores: a forward pass of the policy and one of the reference over all tokens.
- training: all tokens, packed to whole sequences, in updates of `batch` answers.

On policy these follow each other on all devices; one step off, generation has half of the devices to itself (assumed),
and the step is the longer of the two. Not planned: moving weights into the server, rewards, loading data. Assumed:
prompts of 200 tokens, a micro-batch of one packed sequence, recomputation of whole blocks where it does not fit
without. "Longest" is generation over what it would take if every answer had the mean length.
"""

import dataclasses
import statistics
from collections.abc import Mapping

from napkin.hardware.device_file import find_device
from napkin.hardware.service_efficiency import efficiency_of_server
from napkin.model.config import preset
from napkin.planning.layouts.layout_plan import LayoutPlan
from napkin.planning.layouts.stack import find_stack
from napkin.planning.layouts.stack_plan import plan_stack
from napkin.planning.services.replica import Replica, count_work, timeline_of
from napkin.planning.services.server_schedule import Load
from napkin.planning.step.site import fits
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import ParallelismConfig, TrainingConfig
from published_recipes import PublishedRun, read_rows
from result_files import heading, no_options, write_result

DEVICE = "H100-SXM-80GB"
SCORING_PASSES = 2
REPLICAS_DRAWN = 8
"""Replicas whose answers are drawn apart; of more, the last of so many is taken."""


def generation_seconds(row: Mapping[str, str], *, alike: bool = False) -> float:
    """Seconds until the last replica has its longest answer; `alike` has all answers of the mean length."""
    device, tensor = find_device(DEVICE), int(row["generation_tensor"])
    replicas = int(row["generating"]) // tensor
    server = efficiency_of_server("vllm", device)
    replica = Replica(count_work(preset(row["model"])), device, server, tensor)
    mean, longest = int(row["mean_tokens"]), int(row["context_length"])
    load = Load(
        concurrency=int(row["samples"]) / replicas,
        input_tokens=int(row["prompt_tokens"]),
        output_tokens=mean if alike else longest,
        requests_per_client=1,
        mean_output_tokens=None if alike else mean,
    )
    drawn = [dataclasses.replace(load, seed=seed) for seed in range(1 if alike else min(replicas, REPLICAS_DRAWN))]
    return max(timeline_of(replica, each).priced(replica.step_seconds).seconds for each in drawn)


def training_plan(row: Mapping[str, str]) -> LayoutPlan:
    """An update on `batch` answers, packed."""
    context, tokens = int(row["context_length"]), int(row["mean_tokens"]) + int(row["prompt_tokens"])
    data = int(row["data"])
    packed = max(1, round(int(row["batch"]) * tokens / context / data)) * data
    tensor, pipeline, ring, expert = (int(row[name]) for name in ("tensor", "pipeline", "context", "expert"))
    devices = data * tensor * pipeline * ring
    plans = []
    for recompute in ("none", "full"):
        recipe = Recipe(
            model=dataclasses.replace(preset(row["model"]), context_length=context),
            training=TrainingConfig(
                batch_size=packed, micro_batch_size=1, parallelism="ddp", precision="bf16", recompute=recompute
            ),
            parallelism=ParallelismConfig(
                data=data,
                tensor=tensor,
                pipeline=pipeline,
                context=ring,
                expert=expert,
                whole_experts=expert > 1,
                shard_optimizer=data * ring > 1,
            ),
        )
        plans.append(plan_stack(recipe, f"{devices}x{DEVICE}", find_stack(row["stack"])))
        if fits(plans[-1].peak_bytes, plans[-1].site.memory_bytes):
            break
    return plans[-1]


def phases(row: Mapping[str, str]) -> tuple[float, float, float]:
    """Seconds of generation, of scores and of training."""
    plan = training_plan(row)
    updates = int(row["samples"]) / int(row["batch"])
    training = updates * plan.seconds
    forward = sum(stage.compute.forward for stage in plan.stages)
    whole = sum(stage.compute.forward + stage.compute.of("backward") for stage in plan.stages)
    return generation_seconds(row), SCORING_PASSES * training * forward / whole, training


def main() -> None:
    no_options(__doc__)
    head = heading("Seconds of published steps of reinforcement learning and fine-tuning")
    lines = ["| step | devices | published | planned | error | generation | scores | training | longest |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    print("\n".join(lines), flush=True)
    errors, without = [], []
    for row in read_rows("published_rollouts.csv"):
        generation, scores, training = phases(row)
        alike, published = generation_seconds(row, alike=True), float(row["seconds"])
        apart = int(row["generating"]) < int(row["devices"])
        together = max if apart else lambda first, second: first + second
        planned = together(generation, scores + training)
        errors.append(planned / published - 1)
        without.append(together(alike, scores + training) / published - 1)
        lines.append(
            f"| {row['model']} {row['name']} | {row['devices']} | {published:.0f} s | {planned:.0f} s | "
            f"{errors[-1]:+.0%} | {generation:.0f} s | {scores:.0f} s | {training:.0f} s | {generation / alike:.2f} × |"
        )
        print(lines[-1], flush=True)
    n_rows = len(lines)
    lines += ["", "| | median | worst | mean |", "|---|---|---|---|"]
    for name, values in (("planned", errors), ("with answers of the mean length", without)):
        sizes = [abs(value) for value in values]
        lines.append(f"| {name} | {statistics.median(sizes):.0%} | {max(sizes):.0%} | {statistics.mean(values):+.0%} |")
    lines += ["", "| fine-tuning | published | planned | error |", "|---|---|---|---|"]
    for row in read_rows("published_tuning.csv"):
        run = PublishedRun(row)
        seconds = run.plan().seconds
        lines.append(
            f"| {row['stack']} {row['model']} on one A100, {row['name']} | {run.seconds:.2f} s | {seconds:.2f} s | "
            f"{seconds / run.seconds - 1:+.0%} |"
        )
    print("\n".join(lines[n_rows:]))
    write_result("published-rollouts", [*head, *lines])


if __name__ == "__main__":
    main()
