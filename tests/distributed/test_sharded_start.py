"""Ranks that divide a model start with the numbers of one process, and none of them ever holds the whole."""

import json
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import save_file

from distributed.start_cases import CASES, resolved_of
from napkin.distributed.fake_ranks import fake_ranks
from napkin.distributed.sharded_start import PIECE
from napkin.distributed.sharding import parallelize
from napkin.model.config import preset
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import TrainingConfig
from napkin.train_step.step import build_model, undrawn_model
from oracles import huggingface_models
from reliability.ranks import run_script_of_ranks


@pytest.mark.parametrize("size", CASES)
def test_every_rank_starts_with_its_part_of_what_one_process_draws(
    tmp_path: Path, server: subprocess.Popen[str], size: int
) -> None:
    for name, case in CASES[size].items():
        whole = build_model(resolved_of(case))
        save_file(
            {key: each.detach().clone() for key, each in whole.named_parameters()}, tmp_path / f"{name}.safetensors"
        )
    folders = ("llama", "qwen3", "mixtral") if size == 2 else ()
    for name in folders:
        huggingface_models.write_random(tmp_path / f"hf-{name}", huggingface_models.FOLDERS[name])
    run_script_of_ranks(Path(__file__).with_name("start_cases.py"), server, tmp_path, size)
    for rank in range(size):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert {name: found[name] for name in CASES[size]} == {name: [] for name in (*CASES[size],)}
        assert [found[f"hf-{name}"] for name in folders] == [[]] * len(folders)
        if size == 2:
            assert found["shard"] < found["held"] < 1.3 * found["shard"]


def test_a_rank_of_70_billion_parameters_on_64_holds_less_than_two_shards() -> None:
    recipe = Recipe(
        model=preset("llama-3-70b"),
        training=TrainingConfig(batch_size=64, precision="bf16", device="cpu", parallelism="fsdp"),
    )
    resolved = ResolvedRecipe(recipe, Precision("bf16", "cpu"), world_size=64)
    with fake_ranks(64, 5) as ranks:
        model, draws = undrawn_model(resolved)
        made = parallelize(model, resolved, ranks)
        parts = made.parts({name: each.detach() for name, each in model.named_parameters()})
        # What is on the meta device is allocated as shards; all else is there whole before it is divided.
        shard = sum(part.tensor.nbytes for own in parts.values() for part in own)
        whole = sum(each.numel() for name, each in model.named_parameters() if name not in draws)
        tables = sum(each.nbytes for each in model.buffers())
    assert sum(draw.parameter.numel() for draw in draws.values()) > 70e9
    assert shard + 4 * (whole + 2 * PIECE) + tables < 1.1 * shard < 2 * 4 * 70.6e9 / 64
