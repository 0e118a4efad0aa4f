"""Plans of other stacks, and their calibration from runs whose true factors are known."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from napkin.cli.plan.stacks import _measured
from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.planning.layouts import costs as layout_costs
from napkin.planning.layouts.costs import choice_of
from napkin.planning.layouts.rank_bytes import ranks_bytes
from napkin.planning.layouts.stack import find_stack
from napkin.planning.layouts.stack_plan import MeasuredRun, calibrate_stack, plan_stack, stack_costs
from napkin.planning.layouts.stages import stage_contents
from napkin.planning.planner import plan
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import ParallelismConfig, TrainingConfig

MODEL = ModelConfig(vocab_size=4096, d_model=1024, n_heads=8, n_layers=4, context_length=2048, tie_embeddings=False)
LAYOUTS = (ParallelismConfig(shard=16), ParallelismConfig(data=16), ParallelismConfig(data=8, shard=2))


@pytest.fixture(autouse=True)
def counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layouts have one model, whose parts are the same for all of them."""
    real = layout_costs.count_parts

    @functools.cache
    def counted(recompute: Any, resolved: Any) -> Any:
        return real(resolved.value, recompute, (1,))

    class Same:
        """Equal to every other one: the parts do not depend on the batch or the layout."""

        def __init__(self, value: Any) -> None:
            self.value = value

        def __hash__(self) -> int:
            return 0

        def __eq__(self, other: object) -> bool:
            return True

    monkeypatch.setattr(
        layout_costs, "count_parts", lambda resolved, recompute, tensors, plain=None: counted(recompute, Same(resolved))
    )


def _recipe(parallelism: ParallelismConfig) -> Recipe:
    training = TrainingConfig(batch_size=32, micro_batch_size=1, precision="bf16", parallelism="fsdp")
    return Recipe(model=MODEL, training=training, parallelism=parallelism)


@pytest.mark.thorough
def test_factors_of_a_cluster_are_found_in_three_runs_and_a_left_out_run_is_planned_better() -> None:
    stack = find_stack("llm-foundry")
    true = dataclasses.replace(stack, computing=1.25, sending=1.6)
    runs = []
    for parallelism in LAYOUTS:
        recipe = _recipe(parallelism)
        runs.append(MeasuredRun(recipe, "16xH100", plan_stack(recipe, "16xH100", true).seconds))
    found = calibrate_stack(runs, stack)
    assert found.stack.computing == pytest.approx(1.25, rel=0.05)
    # What hides behind computation says little, and the factor is drawn towards 1.
    assert 1.0 < found.stack.sending < 1.7
    assert found.median_left_out < 0.4 * found.median_before
    again = plan_stack(_recipe(LAYOUTS[1]), "16xH100", found.stack)
    assert again.seconds == pytest.approx(runs[1].seconds, rel=0.02)
    assert again.interval[0] < runs[1].seconds < again.interval[1]


def test_experts_that_span_tensor_ranks_are_planned_for_a_stack_and_not_trained() -> None:
    model = dataclasses.replace(MODEL, n_experts=16, experts_per_token=2, d_expert=512)
    whole = ParallelismConfig(tensor=8, data=2, expert=16, whole_experts=True)
    recipe = dataclasses.replace(_recipe(whole), model=model)
    with pytest.raises(NapkinError, match="--stack"):
        plan(recipe, "16xH100")

    def parameter_bytes(parallelism: ParallelismConfig) -> float:
        costs = stack_costs(dataclasses.replace(recipe, parallelism=parallelism), "16xH100", find_stack("nemo"))
        choice = choice_of(costs.resolved)
        contents = stage_contents(costs.model, choice.layout)
        return ranks_bytes(costs, choice, contents, 1)[0].parameters

    # Each of 16 ranks has one expert whole, where each of 8 had an eighth of 16.
    less = parameter_bytes(ParallelismConfig(tensor=8, data=2)) - parameter_bytes(whole)
    bytes_per_expert = 2 * 3 * model.d_model * 512
    assert less == pytest.approx(model.n_layers * (16 / 8 - 1) * bytes_per_expert)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", r"no \[\[run\]\]"),
        ('[[run]]\nrecipe = "a.toml"\non = "8xH100"', "recipe, on and seconds"),
        ('[[run]]\nrecipe = "a.toml"\non = "8xH100"\nseconds = -1', "above 0"),
        ('[[run]]\nrecipe = 1\non = "8xH100"\nseconds = 1', "names"),
        ('[[run]]\nrecipe = "a.toml"\non = "8xH100"\nseconds = 1', "a.toml"),
    ],
)
def test_a_wrong_file_of_runs_is_refused_in_one_line(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "runs.toml"
    path.write_text(text)
    with pytest.raises(NapkinError, match=named) as refused:
        _measured(path)
    assert "\n" not in str(refused.value)


def test_a_micro_batch_that_napkin_would_choose_is_refused_for_another_stack() -> None:
    training = dataclasses.replace(_recipe(LAYOUTS[0]).training, micro_batch_size="auto")
    recipe = dataclasses.replace(_recipe(LAYOUTS[0]), training=training)
    with pytest.raises(NapkinError, match="micro_batch_size"):
        plan_stack(recipe, "16xH100", find_stack("nemo"))
