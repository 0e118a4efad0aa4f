"""Files of other stacks as recipes: batches and ranks by hand, and files that lie."""

from pathlib import Path
from typing import Any

import pytest

from napkin.errors import NapkinError
from napkin.model.config import preset
from napkin.recipe.foreign import read_foreign
from napkin.recipe.foreign_stacks import model_by_name
from napkin.recipe.recipe import Recipe

AXOLOTL = """\
base_model: NousResearch/Meta-Llama-3.1-8B
datasets: [{path: some/where, type: alpaca}]
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 3
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-5
bf16: auto
gradient_checkpointing: true
warmup_steps: 7
max_steps: 90
fsdp_config: {fsdp_version: 2}
wandb_project: tests
"""
VERL = """\
data: {train_files: a.parquet, train_batch_size: 1024, max_prompt_length: 512, max_response_length: 1024}
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-7B-Instruct, enable_gradient_checkpointing: true}
  actor: {strategy: fsdp, ppo_mini_batch_size: 256, ppo_micro_batch_size_per_gpu: 8, optim: {lr: 1e-6}}
  rollout: {n: 5, name: vllm}
algorithm: {adv_estimator: grpo}
trainer: {n_gpus_per_node: 8, nnodes: 2}
"""
ARGUMENTS = """\
model_name_or_path: meta-llama/Llama-3.2-1B-Instruct
output_dir: out
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
bf16: true
max_steps: 500
optim: adamw_torch_fused
max_length: 2048
logging_steps: 5
"""
ACCELERATE = """\
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
"""
DEEPSPEED = """\
{"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10, "bf16": {"enabled": true},
 "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.98], "weight_decay": "auto"}},
 "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "gradient_clipping": 0.5}
"""
TITAN = """\
model = { name = "llama3", flavor = "70B", hf_assets_path = "assets" }
optimizer = { name = "AdamW", lr = 1.5e-4 }
training = { local_batch_size = 8, seq_len = 8192, max_norm = 1.0, steps = 1000, dataset = "c4" }
activation_checkpoint = { mode = "full" }
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
"""
MEGATRON = r"""#!/bin/bash
GPUS_PER_NODE=8
NNODES=8  # of the cluster
ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes ${NNODES})
GPT_ARGS="
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel \
    --num-layers 40 --hidden-size 5120 --num-attention-heads 40 --ffn-hidden-size 13824 \
    --group-query-attention --num-query-groups=8 --seq-length 4096 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --normalization RMSNorm --position-embedding-type rope
    --micro-batch-size 1 --global-batch-size 512 --lr 3e-4 --train-iters 5000 --bf16 --log-interval 10
    --use-distributed-optimizer --vocab-size 32000 --num-layers-per-virtual-pipeline-stage 5"
torchrun ${ARGS[@]} pretrain_gpt.py $GPT_ARGS
"""
NAMES = {
    "axolotl": ("axolotl.yaml", AXOLOTL),
    "verl": ("verl.yml", VERL),
    "DeepSpeed": ("ds.json", DEEPSPEED),
    "torchtitan": ("titan.toml", TITAN),
    "Megatron-LM": ("train.sh", MEGATRON),
    "transformers": ("arguments.yaml", ARGUMENTS),
}


def values(recipe: Recipe, names: str) -> list[Any]:
    return [getattr(getattr(recipe, name.partition(".")[0]), name.partition(".")[2]) for name in names.split()]


@pytest.mark.parametrize(
    ("stack", "ranks", "fields", "expected", "ignored"),
    [
        (
            "axolotl",
            8,
            "training.batch_size training.micro_batch_size model.context_length model.n_layers training.parallelism "
            "training.recompute training.steps optimizer.warmup_steps optimizer.learning_rate optimizer.name",
            [2 * 3 * 8, 2, 4096, 32, "fsdp", "full", 90, 7, 2e-5, "adamw"],
            {"datasets", "wandb_project"},
        ),
        (
            "verl",
            16,
            "training.batch_size training.micro_batch_size model.context_length model.d_model training.parallelism "
            "training.recompute optimizer.learning_rate",
            [256 * 5, 8, 1536, 3584, "fsdp", "full", 1e-6],
            {"data.train_files", "actor_rollout_ref.rollout.name", "algorithm.adv_estimator"},
        ),
        (
            "DeepSpeed",
            None,
            "training.batch_size training.micro_batch_size optimizer.beta2 optimizer.clip_norm "
            "parallelism.shard_optimizer training.offload_optimizer training.precision",
            [256, 4, 0.98, 0.5, True, True, "bf16"],
            {"steps_per_print"},
        ),
        (
            "torchtitan",
            64,
            "training.batch_size training.micro_batch_size model.n_layers model.context_length parallelism.tensor "
            "parallelism.shard parallelism.data training.recompute training.gather_format",
            [8 * 64 // 8, 8, 80, 8192, 8, 8, 1, "full", "bf16"],
            {"model.hf_assets_path", "training.dataset"},
        ),
        (
            "Megatron-LM",
            64,
            "training.batch_size training.micro_batch_size model.d_ff model.n_kv_heads model.feed_forward model.biases "
            "parallelism.tensor parallelism.pipeline parallelism.data parallelism.schedule "
            "parallelism.stages_per_rank parallelism.shard_optimizer model.tie_embeddings",
            [512, 1, 13824, 8, "swiglu", "none", 4, 2, 8, "interleaved-1f1b", 40 // 2 // 5, True, False],
            {"log_interval"},
        ),
        (
            "transformers",
            8,
            "training.batch_size training.micro_batch_size model.context_length model.d_model training.parallelism "
            "training.precision training.steps",
            [4 * 2 * 8, 4, 2048, 2048, "fsdp", "bf16", 500],
            {"output_dir", "logging_steps", "fsdp_config.fsdp_auto_wrap_policy"},
        ),
    ],
)
def test_a_file_is_read_as_its_stack_reads_it(
    tmp_path: Path, stack: str, ranks: int | None, fields: str, expected: list[Any], ignored: set[str]
) -> None:
    name, text = NAMES[stack]
    (tmp_path / name).write_text(text)
    paths = [tmp_path / name]
    if stack == "transformers":
        (tmp_path / "accelerate.yaml").write_text(ACCELERATE)
        paths.append(tmp_path / "accelerate.yaml")
    asked = ranks if stack in ("axolotl", "torchtitan") else None
    found = read_foreign(paths, ranks=asked)
    assert found.stack == stack
    assert found.ranks == ranks
    assert values(found.recipe, fields) == pytest.approx(expected)
    assert set(found.ignored) == ignored
    # Every setting of the file is understood, taken with another, or named.
    assert len(found.understood) >= len(expected) // 2


def test_what_is_planned_otherwise_is_said(tmp_path: Path) -> None:
    for name, text in NAMES.values():
        (tmp_path / name).write_text(text)
    notes = {stack: " ".join(read_foreign([tmp_path / name]).notes) for stack, (name, _) in NAMES.items()}
    assert "paged_adamw_8bit" in notes["axolotl"]
    assert "stage 2 is planned as stage 1" in notes["DeepSpeed"]
    assert "a rollout has 4" in notes["verl"]
    assert not notes["Megatron-LM"]


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b"),
        ("unsloth/Llama-3.2-1B-Instruct-bnb-4bit", "llama-3.2-1b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("gpt2", "gpt2"),
        ("openai-community/gpt2-xl", "gpt2-xl"),
    ],
)
def test_models_are_known_by_the_names_that_they_have_on_a_hub(name: str, same: str) -> None:
    assert model_by_name(name) == preset(same)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "a: 1", "of no stack that is known"),
        ("a.yaml", "", "holds no settings"),
        ("a.yaml", "- base_model: x", "holds no settings"),
        ("a.yaml", "base_model: [", "cannot be read"),
        ("a.yaml", "base_model: x/y-3b\nsequence_len: 5", "shape of the model 'x/y-3b' is not known"),
        ("a.yaml", "base_model: gpt2\nsequence_len: many", "'sequence_len' is 'many'"),
        ("a.yaml", "base_model: gpt2\nsequence_len: 1.5", "'sequence_len' is 1.5"),
        ("a.yaml", "base_model: gpt2\nsequence_len: {a: 1}\nmicro_batch_size: [1]", "'micro_batch_size' is [1]"),
        ("a.yaml", "base_model: !!python/object/apply:os.system ['true']", "cannot be read"),
        ("a.yaml", "base_model: gpt2\nlearning_rate: -1", "learning_rate"),
        (
            "a.yaml",
            "x: &a {b: 1}\ny: &b {c: *a, d: *a}\nz: &c {c: *b, d: *b}\n"
            + "".join(
                f"q{n}: &q{n} {{c: *{'c' if n == 0 else f'q{n - 1}'}, d: *{'c' if n == 0 else f'q{n - 1}'}}}\n"
                for n in range(40)
            ),
            "settings, or tables in",
        ),
        ("a.yaml", "{a: " * 3000, "cannot be read"),
        ("a.json", "[" * 100_000, "cannot be read"),
        ("a.json", '{"train_batch_size": 1e400, "train_micro_batch_size_per_gpu": 1}', "train_batch_size"),
        ("a.toml", "[model", "cannot be read"),
        ("a.sh", "echo hello", "of no stack that is known"),
        ("a.sh", "--num-layers 4 --hidden-size 64 --num-attention-heads 7", "d_model"),
        ("a.sh", "\0\0", "of no stack that is known"),
    ],
)
def test_files_that_lie_are_refused_in_a_line(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(NapkinError) as refused:
        read_foreign([tmp_path / name])
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_no_file_or_is_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_text("a: 1\n" * 300_000)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    for name in ("none.yaml", "", "large.yaml", "bytes.yaml"):
        with pytest.raises(NapkinError):
            read_foreign([tmp_path / name])
