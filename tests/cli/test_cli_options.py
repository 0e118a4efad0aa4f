"""Options: help, and every field of a recipe from the command line."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from napkin.cli import COMMANDS, GROUPS, TOKENIZER
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import format_recipe, read_recipe

OTHER: dict[str, Any] = {
    "data.temperature": 2.0,
    "data.max_epochs": 4.0,
    "data.curriculum": ("3 data/train.tokens=1",),
    "data.prefetch": "on",
    "data.windows": "fixed",
    "data.validation": None,
    "model.d_model": 64,
    "model.n_heads": 8,
    "model.n_kv_heads": 2,
    "model.d_ff": 96,
    "model.head_dim": 32,
    "model.kv_lora_rank": 32,
    "model.q_lora_rank": 48,
    "model.qk_nope_head_dim": 32,
    "model.qk_rope_head_dim": 16,
    "model.v_head_dim": 24,
    "model.kv_sharing": 2,
    "model.mixers": "mamba2*3,attention",
    "model.state_heads": 4,
    "model.rope_length": 1.5,
    "model.router": "sigmoid",
    "model.embedding_scale": 2.0,
    "model.positions": "alibi",
    "model.rope_pairing": "interleaved",
    "model.rope_scaling": "yarn",
    "model.rope_factor": 4.0,
    "model.rope_original_context": 128,
    "model.attention": "plain",
    "model.attention_window": 8,
    "model.attention_softcap": 30.0,
    "model.full_attention_every": 2,
    "model.logit_softcap": 30.0,
    "model.attention_scale": 0.5,
    "model.qk_norm": "head",
    "model.feed_forward": "gelu",
    "model.norm": "layer",
    "model.block": "parallel",
    "model.biases": "qkv",
    "model.dropout": 0.1,
    "model.n_experts": 4,
    "model.n_shared_experts": 1,
    "model.n_dense_layers": 1,
    "model.d_expert": 96,
    "model.expert_capacity": 1.5,
    "model.init": "glorot",
    "model.mup_base_d_model": 64,
    "optimizer.name": "adam",
    "optimizer.learning_rate": 0.5,
    "optimizer.schedule": "linear",
    "optimizer.warmup_steps": 7,
    "optimizer.decay_steps": 9,
    "optimizer.final_fraction": 0.5,
    "optimizer.momentum": 0.5,
    "optimizer.beta1": 0.5,
    "optimizer.beta2": 0.5,
    "optimizer.eps": 0.5,
    "optimizer.weight_decay": 0.5,
    "optimizer.fused": True,
    "optimizer.average_decay": 0.99,
    "training.micro_batch_size": 4,
    "training.recompute": "full",
    "training.precision": "fp32",
    "training.device": "cpu",
    "training.threads": 3,
    "training.parallelism": "fsdp",
    "training.compile": "off",
    "training.cuda_graphs": "off",
    "training.loss_chunk_size": 256,
    "training.kernels": "compiled",
    "training.gather_format": "bf16",
    "training.reduce_format": "bf16",
    "training.checkpoint_writing": "wait",
    "training.on_non_finite": "skip",
    "parallelism.data": 2,
    "parallelism.shard": 2,
    "parallelism.schedule": "gpipe",
    "parallelism.stages_per_rank": 3,
    "parallelism.blocks_per_stage": (5,),
    "tracking.trackers": ("tensorboard", "wandb"),
}
# Fields that make sense only with others.
NEEDS: dict[str, dict[str, Any]] = {
    "model.rope_scaling": {"model.rope_factor": 4.0},
    "model.rope_factor": {"model.rope_scaling": "linear"},
    **{
        f"model.{name}": {"model.kv_lora_rank": 32}
        for name in ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    },
    "model.attention_softcap": {"model.attention": "plain"},
    "model.full_attention_every": {"model.attention_window": 8},
    "model.n_shared_experts": {"model.n_experts": 4},
    "model.n_dense_layers": {"model.n_experts": 4},
    "model.d_expert": {"model.n_experts": 4},
    "model.expert_capacity": {"model.n_experts": 4},
    "model.router_bias": {"model.n_experts": 4},
    "model.rope_original_context": {"model.rope_scaling": "yarn", "model.rope_factor": 4.0},
    "optimizer.decay_steps": {"optimizer.schedule": "warmup-stable-decay"},
    "parallelism.stages_per_rank": {"parallelism.schedule": "interleaved-1f1b"},
    "optimizer.momentum": {"optimizer.name": "nesterov"},
}
FIELDS = [
    f"{table.name}.{field.name}"
    for table in dataclasses.fields(Recipe)
    for field in dataclasses.fields(getattr(Recipe(), table.name))
]


def value_of(recipe: Recipe, name: str) -> Any:
    table, _, field = name.partition(".")
    return getattr(getattr(recipe, table), field)


def option(name: str, value: Any) -> list[str]:
    table, _, field = name.replace("_", "-").partition(".")
    # A switch that may be left open takes a word.
    if isinstance(value, bool) and value_of(Recipe(), name) is not None:
        return [f"--{table}.{field}" if value else f"--{table}.no-{field}"]
    return [f"--{table}.{field}", *map(str, value if isinstance(value, tuple) else [value])]


def another(name: str, value: Any) -> Any:
    if name in OTHER:
        return OTHER[name]
    if isinstance(value, bool):
        return not value
    return f"other/{value}" if isinstance(value, str) else value * 2 if isinstance(value, int) else value / 2


@pytest.mark.sampled(every=11)
@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_a_recipe_can_be_set_printed_and_read_back(napkin, tmp_path: Path, name: str) -> None:
    wanted = another(name, value_of(Recipe(), name))
    file = tmp_path / "recipe.toml"
    needed = NEEDS.get(name, {})
    options = [word for each in {**needed, name: wanted}.items() for word in option(*each)]
    file.write_text(napkin("recipe", *options).out)
    found, defaults = read_recipe(file), Recipe()
    assert value_of(found, name) == wanted
    changed = {field for field in FIELDS if value_of(found, field) != value_of(defaults, field)}
    assert changed == needed.keys() | ({name} if wanted != value_of(defaults, name) else set())


@pytest.mark.parametrize("name", ["data.validation", "model.n_kv_heads", "training.threads", "optimizer.warmup_steps"])
def test_an_option_may_take_back_what_the_file_says(napkin, tmp_path: Path, name: str) -> None:
    file = tmp_path / "recipe.toml"
    table, _, field = name.partition(".")
    said = "other" if name == "data.validation" else 2
    file.write_text(
        format_recipe(
            dataclasses.replace(Recipe(), **{table: dataclasses.replace(getattr(Recipe(), table), **{field: said})})
        )
    )
    done = napkin("recipe", str(file), *option(name, None))
    file.write_text(done.out)
    assert value_of(read_recipe(file), name) is None


@pytest.mark.parametrize(
    ("words", "train"),
    [
        ("a.tokens", "a.tokens"),
        ("a.tokens b.tokens", ("a.tokens", "b.tokens")),
        ("a.tokens=3 b=c.tokens=0.5", {"a.tokens": 3.0, "b=c.tokens": 0.5}),
        ("x=y.tokens", "x=y.tokens"),
    ],
)
def test_training_text_is_named_as_it_is_in_a_shell(napkin, tmp_path: Path, words: str, train: object) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(napkin("recipe", "--data.train", *words.split(), "--data.no-verify").out)
    assert read_recipe(file).data.train == train
    # What a file says is the default of the option that is not given.
    file.write_text(napkin("recipe", str(file), "--training.steps", "9").out)
    assert read_recipe(file).data.train == train


def test_a_file_and_options_make_one_recipe(napkin, tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text("[model]\nn_layers = 7\ntie_embeddings = false\n")
    file.write_text(napkin("recipe", str(file), "--model.d-model", "64", "--model.tie-embeddings").out)
    recipe = read_recipe(file)
    assert (recipe.model.n_layers, recipe.model.d_model, recipe.model.tie_embeddings) == (7, 64, True)


def test_help_shows_every_field_with_type_default_and_meaning(napkin) -> None:
    done = napkin("train", "--help", "all")
    assert done.status == 0
    words = " ".join(done.out.replace("│", " ").replace("|", " ").split())
    for name in FIELDS:
        flag = "--" + name.replace("_", "-")
        assert flag in done.out
        default = value_of(Recipe(), name)
        shown = "".join(default) if isinstance(default, tuple) else default
        after = words[words.index(flag + (" " if not isinstance(default, bool) else ",")) :]
        assert after.index("(default: ") < 600
        assert after[after.index("(default: ") :].replace(" ", "").startswith(f"(default:{shown})"), name
    assert "NapkinError" not in done.out


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("command", ["plan", "train", "count", "ladder", "tune sft", "tune rl", "plan --serve"])
def test_help_shows_a_dozen_options_and_names_the_sections_of_the_others(napkin, command: str) -> None:
    short, everything = (napkin(*command.split(), "--help", *which) for which in ((), ("all",)))
    assert short.status == 0
    first, _, index = short.out.partition("\nall options:")
    shown = re.findall(r"^  (--[a-z][\w.-]+)", first, re.MULTILINE)
    assert 8 <= len(shown) <= 22
    assert {"--training.batch-size", "--training.precision"} <= {*shown}
    sections = dict(re.findall(r"^  (\w+) +(\d+)\b", index, re.MULTILINE))
    every = re.findall(r"^(?:│ |  )(?:-h, )?(--[a-z][\w.-]+)", everything.out, re.MULTILINE)
    assert int(sections.pop("all")) == len(every) > 70
    listed = [
        name
        for section, number in sections.items()
        for found in [
            re.findall(r"^  (?:-h, )?(--[a-z][\w.-]+)", napkin(*command.split(), "--help", section).out, re.MULTILINE)
        ]
        for name in (found if len(found) == int(number) else [f"{number} options, not {found}"])
    ]
    assert sorted(listed) == sorted(every)


def test_an_unknown_section_of_the_help_is_refused_with_the_others(refusal) -> None:
    said = refusal("train", "--help", "modell")
    assert "'modell'" in said
    assert "did you mean model?" in said
    assert {"tracking,", "all"} <= {*said.split()}


def test_every_command_stands_in_a_group_and_its_line_fits_a_terminal(napkin) -> None:
    listed = napkin("--help").out
    assert max(map(len, listed.splitlines())) <= 80
    assert re.findall(r"^  ([\w-]+)  ", listed, re.MULTILINE) == list(COMMANDS)
    assert len(re.findall(r"^\S.*:$", listed, re.MULTILINE)) == len(GROUPS)


@pytest.mark.thorough
def test_the_help_of_all_commands_imports_neither_torch_nor_numpy() -> None:
    program = f"""
import sys
from napkin.cli import main
in_group = [["tokenizer", name] for name in {list(TOKENIZER.commands)}]
for command in [[], *([name] for name in {list(COMMANDS)}), *in_group]:
    assert main([*command, "--help"]) == 0, command
    assert not {{"torch", "numpy", "numba"}} & sys.modules.keys(), command
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"\n  {name} " in done.stdout for name in (*COMMANDS, *TOKENIZER.commands))


@pytest.mark.parametrize("command", [[], ["tokenizer"]])
def test_the_list_of_commands_needs_neither_their_options_nor_rich(command: list[str]) -> None:
    program = f"""
import sys
from napkin.cli import main
assert main([*{command}, "--help"]) == 0
assert not {{"tyro", "rich", "msgspec", "numpy", "torch", "numba"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: napkin" in done.stdout
