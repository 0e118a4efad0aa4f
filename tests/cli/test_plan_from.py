"""`napkin plan --from FILE`: another stack's file is planned, and what was understood is said."""

import json
from pathlib import Path

import pytest

from napkin.planning.layouts.stack import stacks
from napkin.recipe.foreign import read_foreign
from napkin.recipe.toml_file import read_recipe

ARGUMENTS = (
    "per_device_train_batch_size: 2\ngradient_accumulation_steps: 3\nbf16: true\nmax_steps: 30\nlogging_steps: 5\n"
)
LAUNCHER = "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_version: 2}\n"
MODEL = (
    "--model.vocab-size=256",
    "--model.d-model=32",
    "--model.n-layers=1",
    "--model.n-heads=2",
    "--model.context-length=32",
)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("arguments.yaml").write_text(ARGUMENTS)
    Path("accelerate.yaml").write_text(LAUNCHER)
    return ["--from", "arguments.yaml", "--from", "accelerate.yaml", *MODEL]


@pytest.mark.thorough
def test_a_plan_of_another_stacks_files_is_that_of_the_recipe_they_are_read_as(napkin, files: list[str]) -> None:
    done = napkin("plan", *files, "--on", "H100", "--stack", "napkin", "--json")
    assert done.status == 0, done
    planned = json.loads(done.out)
    assert planned["tokens_per_step"] == 2 * 3 * 4 * 32
    assert planned["steps"] == 30
    assert "4 × H100" in planned["device"]["name"]
    assert "per_device_train_batch_size 2 is micro_batch 2" in done.err
    assert "without a part in the plan: logging_steps" in done.err
    printed = napkin("recipe", *files, "--training.precision", "fp32").out
    Path("same.toml").write_text(printed)
    recipe = read_recipe("same.toml")
    assert (recipe.training.batch_size, recipe.training.parallelism, recipe.training.precision) == (24, "fsdp", "fp32")
    same = json.loads(napkin("plan", "same.toml", "--training.precision", "bf16", "--on", "4xH100", "--json").out)
    assert same["peak_by_category"] == planned["peak_by_category"]
    counted = json.loads(napkin("count", "same.toml", "--json").out)
    assert counted["parameters"] == sum(row["count"] for row in planned["table"] if row["quantity"] == "parameters")


TORCHTITAN = """
[model]
flavor = "8B"
name = "llama3"
[training]
seq_len = 8192
local_batch_size = 1
steps = 10
[job]
dump_folder = "out"
"""
MEGATRON = """
torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 \\
  --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --bf16 --vocab-size 512 --train-iters 10
"""
DEEPSPEED = '{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}}'


@pytest.mark.parametrize(
    ("name", "text", "program"),
    [
        ("run.toml", TORCHTITAN, "torchtitan"),
        ("run.sh", MEGATRON, "megatron"),
        ("ds.json", DEEPSPEED, "deepspeed"),
        ("arguments.yaml", ARGUMENTS, "transformers"),
        ("with_deepspeed.yaml", ARGUMENTS + "deepspeed: ds.json\n", "deepspeed"),
    ],
)
def test_files_belong_to_the_program_that_trains(tmp_path: Path, name: str, text: str, program: str) -> None:
    (tmp_path / name).write_text(text)
    run = read_foreign([tmp_path / name])
    assert run.program == program
    assert program in stacks()


def test_a_plan_is_of_the_program_that_the_files_belong_to_and_says_so(napkin, files: list[str]) -> None:
    done = napkin("plan", *files, "--on", "H100", "--json")
    assert done.status == 0, done
    assert "planned as transformers trains: --stack napkin" in done.err
    named = napkin("plan", *files, "--on", "H100", "--stack", "transformers", "--json")
    assert json.loads(named.out) == json.loads(done.out)
    assert json.loads(done.out)["stack"] == "transformers"
    own = napkin("plan", *MODEL, "--from", "arguments.yaml", "--training.device", "cpu", "--json")
    assert "napkin's own step, not that of transformers: --on names no devices" in own.err


def test_a_run_of_several_devices_needs_their_kind(refusal, files: list[str]) -> None:
    assert "run on 4 devices: say of which kind" in refusal("plan", *files)


def test_a_file_of_no_stack_is_refused(refusal, files: list[str]) -> None:
    Path("other.yaml").write_text("a: 1\n")
    assert "of no stack that is known" in refusal("plan", "--from", "other.yaml", "--on", "H100")
    assert "cannot be read" in refusal("plan", "--from", "none.yaml", "--on", "H100")
