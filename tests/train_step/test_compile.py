import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from napkin.accounting.ledger import Ledger, Row
from napkin.accounting.pricing import (
    ASSUMED_SECONDS_ON_GPU,
    MOST_SAVED,
    SAVED,
    SECONDS,
    estimate_compile,
    fusible_seconds,
)
from napkin.checkpoint.folder import read_checkpoint
from napkin.checkpoint.restore import recipe_changes
from napkin.errors import NapkinError
from napkin.files import cache_folder
from napkin.hardware.calibration import ArrayMeasurement, Calibration, Machine, MatmulMeasurement
from napkin.hardware.ceilings import CatalogueCeilings, efficiencies, mean_efficiency
from napkin.hardware.device_file import find_device
from napkin.planning.planner import plan as make_plan
from napkin.planning.step.kernel_choice import choose_compile, describe_compile, refuse_impossible_compile
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import ParallelismConfig
from napkin.training.run import create_run, open_run, train_run
from oracles.tiny_run import tiny_recipe, write_tiny_text
from train_step.compiled_run import CASES, N_STEPS_ALONE, STOPPED_AT

BF16, FP32 = Precision("bf16", "cpu"), Precision("fp32", "cpu")
BYTES_PER_SECOND, CALL_SECONDS = 1e9, 0.25


def run_apart(*arguments: Any) -> dict[str, Any]:
    """What compiled_run.py prints."""
    command = [sys.executable, str(Path(__file__).parent / "compiled_run.py"), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # torch writes its own choice there once it has looked for it.
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("compiled")
    write_tiny_text(folder)
    return run_apart(folder)


@pytest.mark.torture
def test_compiled_losses_and_gradients_follow_the_uncompiled_ones(found: dict[str, Any]) -> None:
    assert len(found["compiled"]) == N_STEPS_ALONE
    for ours, plain in zip(found["compiled"], found["eager"], strict=True):
        assert ours == pytest.approx(plain, rel=1e-5)
    # It is other code: some last bit differs.
    assert found["compiled"] != found["eager"]


@pytest.mark.torture
def test_a_resumed_compiled_run_equals_an_uninterrupted_one(found: dict[str, Any]) -> None:
    assert found["stopped at"] == STOPPED_AT
    # The step that is watched is another one in each: watching changes no bit.
    assert found["stopped"] == found["whole"]


@pytest.mark.torture
def test_a_watched_compiled_step_has_the_products_that_were_counted(found: dict[str, Any]) -> None:
    metered, counted = found["flops"]
    assert metered == counted
    metered, counted = found["peak_bytes"]
    assert metered == pytest.approx(counted, rel=0.01)


@pytest.mark.torture
def test_steps_evaluations_and_runs_of_one_shape_share_what_is_compiled_once(found: dict[str, Any]) -> None:
    assert found["graphs"] == 1


@pytest.mark.torture
def test_code_alone_is_kept_and_no_pickle(found: dict[str, Any]) -> None:
    # Whatever kept them, graphs would stand beside it in files without an ending or of others.
    assert set(found["kept"]) <= {".cpp", ".gch", ".h", ".lock", ".py", ".sha256", ".so"}
    assert ".so" in found["kept"]
    assert found["kept in"] == str(cache_folder() / "torch")


@pytest.mark.torture
def test_compiling_has_seconds_of_its_own_beside_the_estimate_and_draws_no_random_number(found: dict[str, Any]) -> None:
    measured = found["measurement"]
    (row,) = [row for row in measured["table"] if row["quantity"] == "seconds to compile"]
    assert row["count"] == SECONDS
    assert row["meter"] == measured["seconds"]["compiling"] > 0
    assert found["random state kept"]


@pytest.mark.torture
def test_a_compiler_that_fails_ends_the_run_in_one_line_with_the_way_out(found: dict[str, Any]) -> None:
    assert "cannot be compiled (x.cpp:1:1: error: there is no room)" in found["failure"]
    assert 'compile = "off"' in found["failure"]
    assert f"remove '{found['kept in']}'" in found["failure"]
    assert "\n" not in found["failure"]


@pytest.mark.torture
@pytest.mark.parametrize("name", CASES)
def test_all_that_blocks_are_made_of_compiles(name: str) -> None:
    found = run_apart("-", name)
    assert found["graphs"] == 1
    assert found["again"] == found["compiled"]
    fp32 = CASES[name][0] == "fp32"
    # What is dropped is drawn by other code: the losses are alike, no more.
    tolerance = 0.05 if "dropout" in name else 1e-5 if fp32 else 2e-2
    for ours, plain in zip(found["compiled"], found["eager"], strict=True):
        assert ours[0] == pytest.approx(plain[0], rel=tolerance)


def ceilings() -> Calibration:
    return Calibration(
        machine=Machine("cpu", "a CPU", 1, 1, False, "2"),
        measured_at="2026-11-20T00:00:00+00:00",
        matmuls=(MatmulMeasurement("bf16", 256, 256, 256, 1e9),),
        arrays=(ArrayMeasurement(2**20, BYTES_PER_SECOND, BYTES_PER_SECOND),),
        seconds_per_operator=CALL_SECONDS,
        seconds_per_fresh_byte=0.0,
    )


def row(module: str, phase: Any, *, read: int, flops: int = 0) -> Row:
    contraction = (1, 256, 256, 256) if flops else None
    return Row(module, phase, "x", "bf16", flops, flops, 0, contraction, read, 0, 0, 0)


def ledger(*rows: Row) -> Ledger:
    return Ledger(rows, 0, 0, 0, {}, (), {})


FUSIBLE = [row("blocks.0", "forward", read=10**9), row("blocks.7.attention", "backward", read=3 * 10**9)]
OTHERS = [
    row("", "forward", read=10**9),
    row("norm", "forward", read=10**9),
    row("blocks.0", "optimizer", read=10**9),
    row("blocks.0.attention", "forward", read=10**9, flops=10**12),
]


def test_what_fusing_saves_is_a_multiple_of_the_rooflines_of_what_is_between_products_in_blocks() -> None:
    fusible = 1 + CALL_SECONDS + 3 + CALL_SECONDS
    step = ledger(*FUSIBLE, *OTHERS)
    found = estimate_compile(step, ceilings(), device_type="cpu", precision="bf16")
    assert found.saved_per_step == pytest.approx(SAVED["cpu", "bf16"] * fusible)
    assert (found.seconds, found.assumed) == (SECONDS, False)
    fewest = math.floor(SECONDS / found.saved_per_step) + 1
    assert found.pays(fewest)
    assert not found.pays(fewest - 1)
    assert estimate_compile(step, ceilings(), device_type="cpu", precision="fp32").saved_per_step == 0
    assert estimate_compile(step, ceilings(), device_type="cpu", precision="fp8").saved_per_step == 0
    on_gpu = estimate_compile(step, ceilings(), device_type="cuda", precision="bf16")
    assert on_gpu.saved_per_step == pytest.approx((1 - mean_efficiency().fused_share) * fusible)
    assert (on_gpu.seconds, on_gpu.assumed) == (ASSUMED_SECONDS_ON_GPU, True)


def test_no_more_than_a_part_of_a_step_is_said_to_be_saved() -> None:
    found = estimate_compile(ledger(*FUSIBLE), ceilings(), device_type="cpu", precision="bf16")
    assert found.saved_per_step == pytest.approx(MOST_SAVED * (4 + 2 * CALL_SECONDS))


def recipe(compile: str = "auto", *, steps: int = 10**6, **training: Any) -> Recipe:
    found = tiny_recipe("nowhere", steps=steps, compile=compile, **training)
    return dataclasses.replace(found, model=dataclasses.replace(found.model, vocab_size=257))


def test_auto_compiles_the_run_that_earns_its_seconds_back_and_no_other() -> None:
    step = ledger(*FUSIBLE, *OTHERS)
    enough = math.ceil(SECONDS / (SAVED["cpu", "bf16"] * (4 + 2 * CALL_SECONDS)))
    assert choose_compile(ResolvedRecipe(recipe(steps=enough), BF16), step, ceilings()).chosen
    assert not choose_compile(ResolvedRecipe(recipe(steps=enough - 1), BF16), step, ceilings()).chosen
    assert not choose_compile(ResolvedRecipe(recipe(), FP32), step, ceilings()).chosen
    assert choose_compile(ResolvedRecipe(recipe("on", steps=1), FP32), step, ceilings()).chosen
    assert not choose_compile(ResolvedRecipe(recipe("off"), BF16), step, ceilings()).chosen


@pytest.mark.thorough
def test_a_run_of_twenty_steps_is_planned_uncompiled_and_one_that_compiles_is_planned_with_its_seconds() -> None:
    plan = make_plan(recipe(steps=20, precision="bf16"))
    assert plan.recipe.training.compile == "off"
    assert plan.seconds == 20 * plan.price.seconds
    assert describe_compile(plan).startswith("not compiled: would save about ")
    plan = make_plan(recipe("on", steps=20, precision="bf16"))
    assert plan.recipe.training.compile == "on"
    saved = plan.compile_estimate.saved_per_step
    assert plan.seconds == pytest.approx(20 * (plan.price.seconds - saved) + SECONDS)
    assert describe_compile(plan).startswith("compiled: saves about ")


@pytest.mark.thorough
def test_a_plan_for_another_device_has_the_fused_seconds_of_compiled_blocks_and_no_choice_of_its_own() -> None:
    eager = make_plan(recipe(precision="bf16"), on="H100")
    assert not eager.compile_estimate.chosen
    compiled = make_plan(recipe("on", precision="bf16"), on="H100")
    fusible = fusible_seconds(compiled.ledger, CatalogueCeilings(find_device("H100")))
    saved = eager.seconds_per_step - compiled.seconds_per_step
    assert saved == pytest.approx((1 - efficiencies()["hopper"].fused_share) * fusible)
    sharded = make_plan(recipe("on", precision="bf16", parallelism="fsdp"), on="2xH100")
    assert "fsdp" in (sharded.compile_estimate.why_not or "")


@pytest.mark.parametrize("compiler", ["a-compiler-that-is-nowhere", "", os.path.dirname(sys.executable)])
def test_without_a_compiler_auto_stays_uncompiled_and_on_is_refused_in_one_line(compiler: str) -> None:
    from torch._inductor import config

    with config.patch({"cpp.cxx": (compiler,)}):
        found = choose_compile(ResolvedRecipe(recipe(), BF16), ledger(*FUSIBLE, *OTHERS), ceilings())
        assert not found.chosen
        assert found.why_not is not None
        assert "no C++ compiler" in found.why_not
        with pytest.raises(NapkinError, match=r"^training\.compile.*'on'.*C\+\+.*: use .*off.*$"):
            make_plan(recipe("on"))


@pytest.mark.parametrize(
    ("model", "training", "n_ranks", "why"),
    [
        ({"n_experts": 4, "d_expert": 16}, {}, 1, "expert"),
        ({}, {"recompute": "selective"}, 1, "selective"),
        ({}, {"parallelism": "fsdp"}, 2, "fsdp"),
        ({}, {}, 2, "divide matrices"),
    ],
)
def test_what_compiled_code_cannot_do_stays_uncompiled_or_is_refused(
    model: dict[str, Any], training: dict[str, Any], n_ranks: int, why: str
) -> None:
    step = ledger(*FUSIBLE, *OTHERS)

    def changed(wanted: str) -> Recipe:
        found = recipe(wanted, **training)
        parallelism = ParallelismConfig(tensor=2 if why == "divide matrices" else 1)
        return dataclasses.replace(found, model=dataclasses.replace(found.model, **model), parallelism=parallelism)

    found = choose_compile(ResolvedRecipe(changed("auto"), BF16, None, n_ranks), step, ceilings())
    assert not found.chosen
    assert found.why_not is not None
    assert why in found.why_not
    with pytest.raises(NapkinError, match=why):
        refuse_impossible_compile(ResolvedRecipe(changed("on"), BF16, None, n_ranks))
    refuse_impossible_compile(ResolvedRecipe(changed("off"), BF16, None, n_ranks))


def test_a_run_from_before_there_was_a_choice_goes_on_uncompiled_and_as_the_same_recipe(tmp_path: Path) -> None:
    write_tiny_text(tmp_path)
    _, run = create_run(tiny_recipe(tmp_path, steps=1), tmp_path / "run")
    path = run.path / "recipe.toml"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith("compile")))
    preparation, run = open_run(run.path)
    assert preparation.recipe.training.compile == "off"
    checkpoint = read_checkpoint(train_run(preparation, run).checkpoint)
    del checkpoint.state.recipe["training"]["compile"]
    assert not recipe_changes(checkpoint, {"training": dataclasses.asdict(preparation.recipe.training)})
