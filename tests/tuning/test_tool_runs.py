"""Runs of reinforcement learning whose model calls a calculator: planned, learning, resumed to the same bytes."""

import dataclasses
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from napkin.grading.sandbox.confinement import can_confine
from napkin.model.config import ModelConfig
from napkin.model.huggingface.convert import save_huggingface
from napkin.model.huggingface.folder_files import TextForm
from napkin.model.transformer import Transformer
from napkin.recipe.toml_file import format_recipe
from napkin.recipe.training_config import OptimizerConfig
from napkin.recipe.tuning_recipe import ReinforcementConfig, ReinforcementRecipe
from napkin.runs.metrics import read_metrics
from napkin.tokenizer.bpe import BPETokenizer
from napkin.training.run import open_run, train_run
from napkin.tuning.method import tune
from oracles.tiny_tuning import tuning_recipe

pytestmark = [
    pytest.mark.torture,
    pytest.mark.skipif(not can_confine(), reason="the system has no filter of system calls"),
]

END, ASSISTANT, BEGIN, CLOSE = "<|end|>", "<|assistant|>", "<calculator>", "</calculator>"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OWN = """
from napkin.environments import Outcome, ask

class Seven:
    def start(self, seed):
        return ask(f"{seed % 100}?", None)

    def step(self, state, answer):
        return Outcome(float(answer == "7"))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model that begins a turn with a call, with 7 or with 4, and an environment that rewards 7."""
    path = tmp_path_factory.mktemp("tools")
    (path / "own.py").write_text(OWN)
    tokenizer = BPETokenizer([], [END, ASSISTANT, BEGIN, CLOSE])
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, context_length=128, d_model=288, n_layers=1, n_heads=4, tie_embeddings=False
    )
    made = Transformer(config, seed=5)
    ids = {**{chr(n): n for n in range(256)}, **tokenizer.special_tokens}
    follows = torch.full((config.vocab_size, config.vocab_size), -30.0)
    digits = "123456789"
    chain = [(ASSISTANT, [BEGIN, BEGIN, "7", "4"]), (BEGIN, digits), *((each, digits) for each in "+*")]
    for before, after in [*chain, *((digit, ["+", "*", CLOSE, END, END]) for digit in digits), (CLOSE, [END])]:
        for each in after:
            follows[ids[each], ids[before]] = 0
    with torch.no_grad():
        made.embedding.weight.copy_(4 * torch.eye(config.vocab_size, config.d_model))
        made.head_weight.zero_()
        made.head_weight[:, : config.vocab_size] = follows / config.d_model**0.5
    save_huggingface(made, path / "start", tokenizer=tokenizer, form=TextForm([], [END], TEMPLATE))
    return path


def recipe_of(folder: Path, learning_rate: float, **training: int) -> ReinforcementRecipe:
    recipe = tuning_recipe(folder, "rl", **{"batch_size": 4, **training})
    assert isinstance(recipe, ReinforcementRecipe)
    rl = ReinforcementConfig(
        environment=f"{folder}/own.py:Seven",
        tools="calculator",
        tool_calls=2,
        tool_output=40,
        tool_seconds=60.0,
        group_size=8,
        max_answer=12,
        evaluation_prompts=4,
    )
    optimizer = OptimizerConfig(learning_rate=learning_rate, warmup_steps=0)
    return dataclasses.replace(recipe, data=ReinforcementRecipe().data, rl=rl, optimizer=optimizer)


def test_tokens_and_flops_of_a_step_with_tools_are_planned_as_they_are_metered(folder: Path, tmp_path: Path) -> None:
    outcome = tune(recipe_of(folder, 1e-12, steps=4, evaluate_every=4, checkpoint_every=4), tmp_path / "run")
    rows = {row.quantity: row for row in outcome.table}
    for quantity in ("rollout: tokens", "rollout: FLOPs", "update: tokens", "update: FLOPs", "tokens per step"):
        assert rows[quantity].count == rows[quantity].meter, quantity
        assert (rows[quantity].rule or 0) >= (rows[quantity].count or 0), quantity
    figures = [line.figures or {} for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert all((each["part tool calls"] or 0) > 0 for each in figures)
    assert all(1 < (each["turns"] or 0) <= 3 for each in figures)
    assert all((each["sampler_gap_max"] or 0) < 1e-3 for each in figures)


def test_a_run_with_tools_learns_and_resumes_to_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    tune(recipe_of(folder, 1e-3, steps=12, evaluate_every=12, checkpoint_every=6), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step-00000012")
    outcome = train_run(*open_run(tmp_path / "resumed"))
    assert outcome.first_step == 6
    of_whole, of_resumed = (
        (tmp_path / name / "checkpoints" / "step-00000012" / "model.safetensors").read_bytes()
        for name in ("whole", "resumed")
    )
    assert of_whole == of_resumed
    figures = [line.figures or {} for line in read_metrics(tmp_path / "whole" / "metrics.jsonl")]
    resumed = [line.figures for line in read_metrics(tmp_path / "resumed" / "metrics.jsonl")]
    assert resumed == figures
    first, last = (sum(each["reward"] or 0 for each in part) / 3 for part in (figures[:3], figures[-3:]))
    assert first < 0.5 < last


def test_a_run_with_tools_that_is_killed_twice_ends_with_the_bytes_of_one_that_was_not(
    folder: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(folder, 1e-3, steps=10, evaluate_every=10, checkpoint_every=4)
    (tmp_path / "rl.toml").write_text(format_recipe(recipe))

    begin = [sys.executable, "-m", "napkin", "tune", "rl", "rl.toml", "--run"]
    resume = [sys.executable, "-m", "napkin", "resume", "killed"]
    subprocess.run([*begin, "whole"], cwd=tmp_path, check=True, capture_output=True)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    # Before the first checkpoint, and between the first and the second.
    for n_lines, command in ((1, [*begin, "killed"]), (6, resume)):
        with (tmp_path / "messages").open("wb") as messages:
            process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=messages)
            while not metrics.exists() or metrics.read_bytes().count(b"\n") < n_lines:
                assert process.poll() is None, (tmp_path / "messages").read_text()
                time.sleep(0.005)
            helpers = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            assert process.wait() == -signal.SIGKILL
        # What ran programs for it does not stay behind.
        assert helpers
        assert not psutil.wait_procs(helpers, timeout=60)[1]
    subprocess.run(resume, cwd=tmp_path, check=True, capture_output=True)
    last = Path("checkpoints") / "step-00000010"
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "killed" / last / name).read_bytes() == (tmp_path / "whole" / last / name).read_bytes(), name
    whole, killed = (list(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("whole", "killed"))
    assert [(line.step, line.loss, line.figures) for line in killed] == [
        (line.step, line.loss, line.figures) for line in whole
    ]
    assert any((line.figures or {}).get("part tool calls") for line in killed)
