"""Runs that train adapters: what is trained, kept, counted and resumed, and what a user of the run gets."""

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from napkin.accounting.metering import meter_step
from napkin.data.token_file import SEPARATOR
from napkin.errors import NapkinError
from napkin.inference.loaded_model import LoadedModel, load
from napkin.model.adapters import adapters_off, merge_adapters
from napkin.model.transformer import Transformer
from napkin.planning.rules import multiplying_parameters_by_rule
from napkin.recipe.precision import Precision
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import TrainingConfig
from napkin.recipe.tuning_recipe import AdapterConfig, TuningRecipe
from napkin.tokenizer import train_bpe
from napkin.train_step.step import TrainState, build_train_state
from napkin.training.run import open_run, prepare, train_run
from napkin.tuning.example_method import SupervisedObjective
from napkin.tuning.example_plan import ExamplePlan, count_examples
from napkin.tuning.method import open_base, tune
from napkin.tuning.packing import micro_batches_of
from napkin.tuning.sequence_step import totals_of, train_on_examples
from oracles.alignment_cases import MODEL, some_examples
from oracles.model_switches import disturbed
from oracles.tiny_tuning import make_start, tuning_recipe, write_conversations
from reliability.ranks import run_script_of_ranks
from tuning.rank_adapters import CASES, adapter_gradients


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters")
    make_start(path)
    write_conversations(path / "train.jsonl", 10)
    write_conversations(path / "held_out.jsonl", 5, seed=1)
    return path


def adapter_recipe(folder: Path, adapter: AdapterConfig, **changes: Any) -> TuningRecipe:
    recipe = tuning_recipe(folder, **changes)
    return dataclasses.replace(
        recipe, adapter=adapter, optimizer=dataclasses.replace(recipe.optimizer, average_decay=0.5)
    )


def stored(run: Path, step: int, name: str) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / f"{name}.safetensors")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        *(pytest.param(kind, "fp32", marks=pytest.mark.torture) for kind in ("lora", "dora")),
        ("lora", "bf16"),
    ],
)
def test_a_run_trains_its_adapters_alone(folder: Path, tmp_path: Path, kind: Any, precision: Any) -> None:
    run = tmp_path / "run"
    outcome = tune(adapter_recipe(folder, AdapterConfig(kind, rank=2), precision=precision), run)
    rows = {row.quantity: row for row in outcome.table}
    assert rows["FLOPs per step"].count == rows["FLOPs per step"].meter
    if precision == "fp32":
        assert rows["peak bytes"].meter == pytest.approx(rows["peak bytes"].count, rel=0.01)

    start = Transformer(open_base(folder / "start").config)
    open_base(folder / "start").load_into(start)
    adapters, frozen = stored(run, 6, "model"), load_file(run / "checkpoints" / "frozen" / "model.safetensors")
    trained, weights = adapters.keys(), adapters | frozen
    assert trained == {name for name in weights if ".adapter." in name}
    for name, parameter in start.named_parameters():
        held = weights[name]
        narrow = precision == "bf16" and name.startswith("blocks.") and parameter.ndim == 2
        assert held.dtype == (torch.bfloat16 if narrow else torch.float32)
        assert torch.equal(held, parameter.to(held.dtype))
    assert all(weights[name].abs().sum() > 0 for name in trained)
    # Two moments and the average, of adapters alone.
    state = stored(run, 6, "optimizer")
    assert {name.partition(".")[2] for name in state} == trained
    assert len(state) == 3 * len(trained)

    # The run is used with its averaged adapters merged.
    expected = build_train_state(ResolvedRecipe(load(run).recipe, Precision("fp32", "cpu"))).model
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            parameter.copy_(state.get(f"average.{name}", weights[name]))
    merge_adapters(expected)
    assert_equal(load(run).model, expected)
    again = Transformer(open_base(run).config)
    open_base(run).load_into(again)
    assert_equal(again, expected)


def assert_equal(one: Transformer, other: Transformer) -> None:
    assert one.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


@pytest.mark.thorough
def test_a_resumed_run_ends_with_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    recipe = adapter_recipe(folder, AdapterConfig("dora", rank=2), precision="bf16")
    tune(recipe, tmp_path / "run")
    files = [
        tmp_path / "run" / "checkpoints" / "step-00000006" / f"{stem}.safetensors" for stem in ("model", "optimizer")
    ]
    whole = [file.read_bytes() for file in files]
    for file in files[0].parent.iterdir():
        file.unlink()
    files[0].parent.rmdir()
    train_run(*open_run(tmp_path / "run"))
    assert [file.read_bytes() for file in files] == whole


def test_matrices_that_a_start_does_not_have_leave_nothing_behind(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NapkinError, match="names 'head'"):
        tune(adapter_recipe(folder, AdapterConfig("lora", modules=("head",))), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def train_state_of(kind: Any = "lora", precision: Any = "fp32", **training: Any) -> TrainState:
    recipe = TuningRecipe(
        model=dataclasses.replace(MODEL, d_model=64, tie_embeddings=False, vocab_size=300),
        training=TrainingConfig(batch_size=4, threads=1, **{"kernels": "plain", **training}),
        adapter=AdapterConfig(kind, rank=4, modules=("attention", "mlp.down")),
    )
    return build_train_state(ResolvedRecipe(recipe, Precision(precision, "cpu")))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "precision", "changes"),
    [
        # DoRA's step has all that LoRA's has.
        ("dora", "fp32", {}),
        pytest.param("lora", "fp32", {}, marks=pytest.mark.torture),
        pytest.param("dora", "bf16", {"recompute": "selective"}, marks=pytest.mark.torture),
        pytest.param("dora", "bf16", {"kernels": "compiled"}, marks=pytest.mark.torture),
        pytest.param("lora", "fp32", {"recompute": "selective"}, marks=pytest.mark.torture),
        pytest.param("lora", "bf16", {}, marks=pytest.mark.torture),
        pytest.param("dora", "fp32", {"recompute": "full"}, marks=pytest.mark.torture),
        pytest.param("lora", "fp32", {"kernels": "compiled"}, marks=pytest.mark.torture),
    ],
)
def test_a_step_is_counted_as_it_is_metered_and_computed_alike(kind: str, precision: str, changes: Any) -> None:
    state, plain = train_state_of(kind, precision, **changes), train_state_of(kind, precision)
    examples, objective = some_examples(6), SupervisedObjective()
    parts = micro_batches_of(examples, max_tokens=32, row_length=32)
    counted = count_examples(state.resolved, parts, totals_of(parts), objective)
    losses = []
    for each in (state, plain):
        steps = [train_on_examples(each, number, examples, objective, max_tokens=32) for number in range(2)]
        losses.append([step.loss for step in steps])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if precision == "fp32" else 1e-2)
    metered = meter_step(state.model, lambda: train_on_examples(state, 2, examples, objective, max_tokens=32))
    assert counted.flops == metered.ledger.flops
    # The step's loss, and what measures it.
    if precision == "fp32":
        assert 0 <= metered.peak_bytes - counted.peak_bytes < 1000
    held = [parameter for parameter in state.model.parameters() if not parameter.requires_grad]
    assert all(parameter.grad is None for parameter in held)


def test_frozen_matrices_cost_no_product_of_their_gradient() -> None:
    """Forward, and the input's gradient: two thirds of a step that trains all weights, but for what is small."""
    examples, objective = some_examples(6), SupervisedObjective()
    parts = micro_batches_of(examples, max_tokens=10_000, row_length=32)
    state = train_state_of()
    resolved = state.resolved
    assert isinstance(resolved.recipe, TuningRecipe)
    whole = dataclasses.replace(
        resolved, recipe=dataclasses.replace(resolved.recipe, adapter=AdapterConfig()), world_size=1
    )
    frozen, trained = (count_examples(each, parts, totals_of(parts), objective) for each in (resolved, whole))
    tokens = sum(part.rows.inputs.numel() for part in parts)
    targets = sum(len(part.rows.targets) for part in parts)
    config = resolved.recipe.model
    d, d_ff = config.d_model, config.resolved_d_ff
    products = sum(2 * tokens * weights for weights in (4 * d * d, 3 * d * d_ff)) * config.n_layers
    head = 2 * targets * d * config.vocab_size
    # Low-rank: queries, keys, values (the B of the three are one matrix), output, down. Forward; B and A; and inputs.
    shapes = ((d, 12, 3 * d), (d, 4, d), (d_ff, 4, d))
    low = sum(2 * tokens * r * (inputs + outputs) for inputs, r, outputs in shapes) * config.n_layers
    # Nothing reads the gradient of the first block's input.
    unread = 2 * tokens * (3 * d * d) + 2 * tokens * 12 * d
    assert trained.flops - frozen.flops == products + head - 3 * low + unread


def test_without_its_adapters_a_tuned_model_is_its_start() -> None:
    state, before = train_state_of("dora"), train_state_of("dora")
    tokens = torch.arange(20)[None]
    for number in range(3):
        train_on_examples(state, number, some_examples(6), SupervisedObjective(), max_tokens=64)
    with adapters_off(state.model), adapters_off(before.model), torch.no_grad():
        assert torch.equal(state.model(tokens), before.model(tokens))
    assert not torch.equal(state.model(tokens), before.model(tokens))


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.torture)])
def test_ranks_have_the_gradient_of_one_process(tmp_path: Path, server: subprocess.Popen[str], size: int) -> None:
    run_script_of_ranks(Path(__file__).with_name("rank_adapters.py"), server, tmp_path, size)
    gradients = load_file(tmp_path / "gradients.safetensors")
    for kind, precision in CASES:
        expected = adapter_gradients(kind, precision)
        for strategy in ("ddp", "fsdp"):
            found = gradients[f"{kind}, {precision}, {strategy}"]
            # Rounded to 8 bits in another order, an update ago.
            limit = 1e-6 if precision == "fp32" else 0.1
            assert float((found - expected).norm() / expected.norm()) < limit, (kind, precision, strategy)


def test_tuning_from_a_gguf_file_is_tuning_from_the_folder_with_its_weights(folder: Path) -> None:
    tokenizer = train_bpe(["abc de " * 9], vocab_size=262, special_tokens=[SEPARATOR])
    config = dataclasses.replace(MODEL, vocab_size=tokenizer.vocab_size)
    model = LoadedModel.of(disturbed(config).eval(), tokenizer)
    recipe = adapter_recipe(folder, AdapterConfig(kind="lora", rank=2), steps=2, checkpoint_every=2)
    for start in ("start.gguf", "start-folder"):
        model.export(folder / start, to="F32")
        tuning = dataclasses.replace(recipe.tuning, start=str(folder / start))
        tune(dataclasses.replace(recipe, tuning=tuning), folder / f"of-{start}")
    ours, theirs = (stored(folder / f"of-{start}", 2, "model") for start in ("start.gguf", "start-folder"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_rule_of_a_plan_has_attention_over_rows_and_not_over_the_context(folder: Path) -> None:
    plan = prepare(tuning_recipe(folder, steps=2)).plan
    assert isinstance(plan, ExamplePlan)
    model = plan.recipe.model
    assert 0 < plan.row_length < model.context_length
    # Per token 6 FLOPs for each number of the matrices, and 12·L·d·T for attention over all pairs.
    attention = 12 * model.n_layers * model.d_model * plan.row_length
    expected = plan.tokens * (6 * multiplying_parameters_by_rule(model) + attention)
    assert plan.rule_flops == expected
