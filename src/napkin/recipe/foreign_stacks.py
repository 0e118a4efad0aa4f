"""The settings of other stacks as fields of a recipe: a table for each stack, and functions for the rest."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from napkin.errors import NapkinError, suggestion
from napkin.model.config import ModelConfig, presets

Settings = dict[str, Any]
"""The settings of a file by their names, tables within tables as "trainer.n_gpus_per_node"."""


@dataclass(frozen=True)
class Understood:
    """A setting of another stack's file, and what it is here."""

    setting: str
    value: Any
    field: str
    """A field of a recipe, as "training.steps"; or "ranks", "model"."""
    means: Any


Line = tuple[str, tuple[str, ...], Callable[[Any], Any]]
"""A field of a recipe, the settings that say it, of which the first that is given counts, and how its value is read.
Besides fields: "micro_batch" and "batch" are sequences of a rank and of all, "accumulation" is micro-batches per
update, "ranks" devices, "model" a whole config."""


class Reading:
    """Settings that are read one by one: what they mean, and which are left."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.used: set[str] = set()
        self.fields: dict[str, Any] = {}
        self.understood: list[Understood] = []
        self.notes: list[str] = []

    def take(self, *names: str) -> tuple[str, Any]:
        """The first of the settings that is given, and its value; None where none is."""
        value = None
        for name in names:
            if name in self.settings:
                self.used.add(name)
                if value is None and self.settings[name] is not None:
                    value = name, self.settings[name]
        return value or ("", None)

    def field(self, field: str, *names: str, how: Callable[[Any], Any] = lambda value: value) -> Any:
        """Read a setting as one of our fields. What is None, or means None, leaves the field as it is."""
        name, value = self.take(*names)
        if value is None:
            return None
        try:
            means = how(value)
        except (TypeError, ValueError, KeyError, OverflowError):
            raise NapkinError(f"'{name}' is {value!r}, which cannot be read as {field}: correct it there") from None
        if means is not None:
            self.fields[field] = means
            self.understood.append(Understood(name, value, field, means))
        return means

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def whole(value: Any) -> int | None:
    """A whole number above 0; None for -1 and 0, with which stacks mark a missing value."""
    number = int(value)
    if number != float(value):
        raise ValueError(value)
    return number if number > 0 else None


def yes(value: Any) -> bool:
    """True where a switch is on; "auto" is on, as the stacks decide on a recent GPU."""
    return str(value).lower() in ("true", "1", "yes", "on", "auto")


def real(value: Any) -> float:
    """A number; YAML reads 1e-5 as text."""
    return float(value)


_OPTIMIZERS = (
    (re.compile(r"adafactor"), "adafactor"),
    (re.compile(r"lion"), "lion"),
    (re.compile(r"muon"), "muon"),
    (re.compile(r"sgd"), "momentum"),
    (re.compile(r"adagrad"), "adagrad"),
    (re.compile(r"rmsprop"), "rmsprop"),
    (re.compile(r"adam"), "adamw"),
)
_SCHEDULES = (
    (re.compile(r"cosine"), "cosine"),
    (re.compile(r"linear|warmupdecaylr"), "linear"),
    (re.compile(r"wsd|warmup_stable|stable"), "warmup-stable-decay"),
    (re.compile(r"inverse"), "inverse-square-root"),
    (re.compile(r"constant|warmuplr"), "constant"),
)


def _named(table: Iterable[tuple[re.Pattern[str], str]]) -> Callable[[Any], str | None]:
    return lambda value: next((ours for pattern, ours in table if pattern.search(str(value).lower())), None)


def _optimizer(read: Reading, *names: str) -> None:
    named = str(read.take(*names)[1] or "").lower()
    optimizer = read.field("optimizer.name", *names, how=_named(_OPTIMIZERS))
    if named and optimizer is None:
        read.note(f"the optimizer {named!r} is planned as adamw")
    if re.search(r"8bit|4bit|fp8|offload", named):
        read.note(f"{named!r} keeps its state in fewer bytes than the {optimizer or 'adamw'} that is planned")


def _schedule(read: Reading, *names: str) -> None:
    read.field("optimizer.schedule", *names, how=_named(_SCHEDULES))


def _model(read: Reading, *names: str) -> None:
    read.field("model", *names, how=lambda name: model_by_name(str(name), read.note))


def _recompute(read: Reading, *names: str) -> None:
    def how(value: Any) -> str | None:
        word = str(value).lower()
        if word in ("selective", "core_attn"):
            return "selective"
        return "full" if word in ("full", "uniform", "block", "unsloth", "offload") or yes(value) else "none"

    read.field("training.recompute", *names, how=how)


_SUFFIX = re.compile(r"[-_](hf|base|instruct|chat|it|v0\.\d|pt|sft|dpo|bnb|4bit|8bit|unsloth|2507|thinking)(?=[-_]|$)")


def model_by_name(name: str, note: Callable[[str], None] = lambda text: None) -> ModelConfig:
    """The config of a model by its name on a hub, such as "NousResearch/Meta-Llama-3.1-8B-Instruct", or of its folder.

    Raises NapkinError for a model that is neither a preset nor a folder with a config.json.
    """
    if (Path(name) / "config.json").is_file():
        # Commands that print help, completion and recipes do without torch.
        from napkin.model.huggingface.convert import read_huggingface_config

        return read_huggingface_config(name)
    known = presets()
    published = {config.source.lower().rpartition("/")[2]: preset for preset, config in known.items()}
    short = name.lower().rstrip("/").rpartition("/")[2].removeprefix("meta-").removeprefix("unsloth-")
    stripped = _SUFFIX.sub("", _SUFFIX.sub("", short))
    for candidate in (
        short,
        stripped,
        stripped.replace("llama3", "llama-3"),
        stripped.replace("llama-3.3", "llama-3.1"),
    ):
        preset = published.get(candidate) or (candidate if candidate in known else None)
        if preset is not None:
            if preset != short:
                note(f"the model '{name}' has the shape of the preset {preset}")
            return known[preset].model
    raise NapkinError(
        f"the shape of the model '{name}' is not known: give --preset or --model.d-model and its other sizes, or name "
        f"a folder with its config.json; {suggestion(stripped, known)}"
    )


# transformers' names, which axolotl and TRL use too.

_ARGUMENTS: tuple[Line, ...] = (
    ("training.steps", ("max_steps",), whole),
    ("optimizer.learning_rate", ("learning_rate", "lr"), real),
    ("optimizer.warmup_steps", ("warmup_steps",), int),
    ("optimizer.weight_decay", ("weight_decay",), real),
    ("optimizer.beta1", ("adam_beta1",), real),
    ("optimizer.beta2", ("adam_beta2",), real),
    ("optimizer.eps", ("adam_epsilon",), real),
    ("optimizer.clip_norm", ("max_grad_norm",), lambda value: real(value) or None),
    ("accumulation", ("gradient_accumulation_steps",), whole),
    ("micro_batch", ("per_device_train_batch_size", "micro_batch_size"), whole),
    ("training.init_seed", ("seed",), int),
)


def _take_all(read: Reading, table: Iterable[Line]) -> None:
    for field, names, how in table:
        read.field(field, *names, how=how)


def _transformers(read: Reading) -> None:
    _model(read, "model_name_or_path", "model_name", "model")
    _take_all(read, _ARGUMENTS)
    _optimizer(read, "optim")
    _schedule(read, "lr_scheduler_type")
    _recompute(read, "gradient_checkpointing")
    read.field("model.context_length", "max_length", "max_seq_length", "max_seq_len", "block_size", how=whole)
    read.field("training.compile", "torch_compile", how=lambda value: "on" if yes(value) else "off")
    for name, ours in (("bf16", "bf16"), ("fp16", "fp16")):
        read.field("training.precision", name, how=lambda value, ours=ours: ours if yes(value) else None)
    if read.fields.get("training.precision") is None:
        read.fields["training.precision"] = "fp32"
    _accelerate(read)
    _adapter(read, "use_peft", "lora_r")


def _accelerate(read: Reading) -> None:
    """The YAML of accelerate, whose names stand beside those of TrainingArguments."""
    kind = str(read.take("distributed_type")[1] or "").upper()
    read.field("ranks", "num_processes", "world_size", how=whole)
    read.take("num_machines", "machine_rank")
    read.field(
        "training.precision",
        "mixed_precision",
        how=lambda value: {"bf16": "bf16", "fp16": "fp16", "no": "fp32", "fp8": "fp8"}[str(value).lower()],
    )
    sharding = str(read.take("fsdp_config.fsdp_sharding_strategy", "fsdp_sharding_strategy", "fsdp")[1] or "").lower()
    gathered = read.take("fsdp_config.fsdp_reshard_after_forward", "fsdp_config.reshard_after_forward")[1]
    version = read.take("fsdp_config.fsdp_version", "fsdp_version")[1]
    given = any(name.startswith("fsdp_config.") for name in read.settings)
    if kind == "FSDP" or sharding or version or (given and not kind):
        read.fields["training.parallelism"] = "fsdp"
        read.understood.append(Understood("distributed_type", kind or "FSDP", "training.parallelism", "fsdp"))
        if "no_shard" in sharding or sharding == "3":
            read.fields["training.parallelism"] = "ddp"
        elif "grad_op" in sharding or sharding == "2" or (gathered is not None and not yes(gathered)):
            read.note("parameters that stay gathered after the forward pass are planned as gathered again (FULL_SHARD)")
    _recompute(read, "fsdp_config.fsdp_activation_checkpointing", "fsdp_config.activation_checkpointing")
    offload = read.take("fsdp_config.fsdp_offload_params", "fsdp_config.offload_params")[1]
    if offload is not None and yes(offload):
        read.fields["training.offload_optimizer"] = True
        read.note("parameters that are offloaded to the host are planned as optimizer state that is")
    _deepspeed_settings(read, "deepspeed_config.")


def _axolotl(read: Reading) -> None:
    _model(read, "base_model", "base_model_config")
    read.take("model_type", "tokenizer_type")
    _take_all(read, _ARGUMENTS)
    read.field("model.context_length", "sequence_len", how=whole)
    _optimizer(read, "optimizer")
    _schedule(read, "lr_scheduler")
    _recompute(read, "gradient_checkpointing")
    half = [read.take(name)[1] for name in ("bf16", "bfloat16")]
    fp16 = [read.take(name)[1] for name in ("fp16", "float16")]
    if any(value is not None and yes(value) for value in half):
        # The model is loaded in bf16, and trained in it where FSDP or DeepSpeed keep no copy in fp32.
        read.fields["training.precision"] = "bf16-pure"
        read.understood.append(Understood("bf16", True, "training.precision", "bf16-pure"))
    elif any(value is not None and yes(value) for value in fp16):
        read.fields["training.precision"] = "fp16"
    else:
        read.fields["training.precision"] = "fp32"
    read.take("tf32")
    read.field("parallelism.tensor", "tensor_parallel_size", how=whole)
    read.field("parallelism.context", "context_parallel_size", "sequence_parallel_degree", how=whole)
    read.field("parallelism.shard", "dp_shard_size", how=whole)
    read.field("parallelism.data", "dp_replicate_size", how=whole)
    read.field("training.compile", "torch_compile", how=lambda value: "on" if yes(value) else "off")
    _accelerate(read)
    if read.fields.get("training.parallelism") == "fsdp":
        read.fields["training.precision"] = "bf16" if "bf16" in read.fields["training.precision"] else "fp32"
    _adapter(read, "adapter", "lora_r")
    if read.take("rl")[1] is not None:
        read.note(f"the objective {read.settings['rl']!r} is planned as one pass of training over its completions")


def _adapter(read: Reading, switch: str, rank: str) -> None:
    kind, width = read.take(switch)[1], read.take(rank)[1]
    named = str(kind).lower() not in ("none", "false", "") if kind is not None else False
    if named or (switch == "use_peft" and width):
        for name in ("lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear", "lora_modules_to_save"):
            read.take(name)
        read.note("the adapter is planned as training all weights, an upper bound: `napkin tune sft` plans adapters")


def read_deepspeed(read: Reading) -> None:
    read.field("batch", "train_batch_size", how=_unless_auto(whole))
    read.field("micro_batch", "train_micro_batch_size_per_gpu", how=_unless_auto(whole))
    read.field("accumulation", "gradient_accumulation_steps", how=_unless_auto(whole))
    read.field("optimizer.clip_norm", "gradient_clipping", how=_unless_auto(lambda value: real(value) or None))
    _optimizer(read, "optimizer.type")
    read.field("optimizer.learning_rate", "optimizer.params.lr", how=_unless_auto(real))
    read.field("optimizer.weight_decay", "optimizer.params.weight_decay", how=_unless_auto(real))
    betas = read.take("optimizer.params.betas")[1]
    if isinstance(betas, list) and len(betas) == 2:
        read.fields["optimizer.beta1"], read.fields["optimizer.beta2"] = map(float, betas)
    read.field("optimizer.eps", "optimizer.params.eps", how=_unless_auto(real))
    _schedule(read, "scheduler.type")
    read.field("optimizer.warmup_steps", "scheduler.params.warmup_num_steps", how=_unless_auto(int))
    read.field("training.steps", "scheduler.params.total_num_steps", how=_unless_auto(whole))
    _deepspeed_settings(read, "")


def _unless_auto(how: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """DeepSpeed's "auto" is what the Trainer says."""
    return lambda value: None if value == "auto" else how(value)


def _deepspeed_settings(read: Reading, prefix: str) -> None:
    for name in ("bf16", "fp16"):
        enabled = read.take(f"{prefix}{name}.enabled")[1]
        if enabled is not None and yes(enabled):
            read.fields["training.precision"] = name
            read.understood.append(Understood(f"{prefix}{name}.enabled", enabled, "training.precision", name))
    setting, stage = read.take(f"{prefix}zero_optimization.stage", f"{prefix}zero_stage")
    if stage is not None:
        stage = int(stage)
        if stage == 3:
            read.fields["training.parallelism"] = "fsdp"
            read.understood.append(Understood(setting, stage, "training.parallelism", "fsdp"))
        elif stage:
            read.fields["parallelism.shard_optimizer"] = True
            read.understood.append(Understood(setting, stage, "parallelism.shard_optimizer", True))
            if stage == 2:
                read.note("ZeRO stage 2 is planned as stage 1: gradients are not sharded, an upper bound")
    for which in ("offload_optimizer", "offload_param"):
        _, device = read.take(
            f"{prefix}zero_optimization.{which}.device",
            f"{prefix}{which}_device",
            f"{prefix}zero_optimization.cpu_offload",
        )
        if device is not None and str(device).lower() not in ("none", "false"):
            read.fields["training.offload_optimizer"] = True
            if str(device).lower() == "nvme" or which == "offload_param":
                read.note(f"{which} on {device} is planned as optimizer state in the host's memory")


_TITAN_OPTIONS: tuple[Line, ...] = (
    ("model.context_length", ("training.seq_len",), whole),
    ("micro_batch", ("training.local_batch_size", "training.batch_size"), whole),
    ("batch", ("training.global_batch_size",), whole),
    ("training.steps", ("training.steps",), whole),
    ("optimizer.clip_norm", ("training.max_norm",), real),
    ("optimizer.learning_rate", ("optimizer.lr",), real),
    ("optimizer.eps", ("optimizer.eps",), real),
    ("optimizer.beta1", ("optimizer.beta1",), real),
    ("optimizer.beta2", ("optimizer.beta2",), real),
    ("optimizer.weight_decay", ("optimizer.weight_decay",), real),
    ("optimizer.warmup_steps", ("lr_scheduler.warmup_steps", "training.warmup_steps"), int),
    ("parallelism.tensor", ("parallelism.tensor_parallel_degree", "training.tensor_parallel_degree"), whole),
    (
        "parallelism.pipeline",
        ("parallelism.pipeline_parallel_degree", "experimental.pipeline_parallel_degree"),
        whole,
    ),
    ("parallelism.context", ("parallelism.context_parallel_degree", "experimental.context_parallel_degree"), whole),
    ("parallelism.expert", ("parallelism.expert_parallel_degree",), whole),
    (
        "parallelism.data",
        ("parallelism.data_parallel_replicate_degree", "training.data_parallel_replicate_degree"),
        whole,
    ),
    ("parallelism.shard", ("parallelism.data_parallel_shard_degree", "training.data_parallel_shard_degree"), whole),
)


def _torchtitan(read: Reading) -> None:
    name, flavor = read.take("model.name")[1], read.take("model.flavor")[1]
    if name is not None and flavor is not None:
        family = {"llama3": "llama-3", "llama4": "llama-4", "deepseek_v3": "deepseek-v3"}.get(str(name), str(name))
        config = model_by_name(f"{family}-{flavor}", read.note)
        read.fields["model"] = config
        read.understood.append(Understood("model.flavor", f"{name} {flavor}", "model", f"{config.n_layers} layers"))
    _take_all(read, _TITAN_OPTIONS)
    _optimizer(read, "optimizer.name")
    _recompute(read, "activation_checkpoint.mode")
    if read.take("activation_checkpoint.selective_ac_option")[1] is not None:
        read.note("selective recomputation by operator is planned as napkin's own: attention and feed-forward")
    read.field(
        "training.compile", "compile.enable", "training.compile", how=lambda value: "on" if yes(value) else "off"
    )
    # Weights in fp32, gathered and multiplied in bf16, gradients reduced in fp32.
    read.fields.update({"training.parallelism": "fsdp", "training.precision": "bf16", "training.gather_format": "bf16"})
    if any(key.startswith("float8.") for key in read.settings) or "float8" in str(read.take("model.converters")[1]):
        read.fields["training.precision"] = "fp8"
    read.take("training.mixed_precision_param", "training.mixed_precision_reduce")
    schedule = str(read.take("parallelism.pipeline_parallel_schedule")[1] or "1F1B").lower()
    if read.fields.get("parallelism.pipeline", 1) > 1:
        ours = {
            "gpipe": "gpipe",
            "interleaved1f1b": "interleaved-1f1b",
            "interleavedzerobubble": "zb-h1",
            "zbvzerobubble": "zb-v",
        }
        read.fields["parallelism.schedule"] = ours.get(schedule, "1f1b")


_MEGATRON: tuple[Line, ...] = (
    ("model.n_layers", ("num_layers",), whole),
    ("model.d_model", ("hidden_size",), whole),
    ("model.d_ff", ("ffn_hidden_size",), whole),
    ("model.n_heads", ("num_attention_heads",), whole),
    ("model.n_kv_heads", ("num_query_groups",), whole),
    ("model.head_dim", ("kv_channels",), whole),
    ("model.context_length", ("seq_length", "encoder_seq_length"), whole),
    ("model.vocab_size", ("padded_vocab_size", "vocab_size"), whole),
    ("model.n_experts", ("num_experts",), whole),
    ("model.experts_per_token", ("moe_router_topk",), whole),
    ("model.d_expert", ("moe_ffn_hidden_size",), whole),
    ("model.rope_theta", ("rotary_base",), real),
    ("model.norm_eps", ("norm_epsilon", "layernorm_epsilon"), real),
    ("micro_batch", ("micro_batch_size",), whole),
    ("batch", ("global_batch_size",), whole),
    ("training.steps", ("train_iters",), whole),
    ("optimizer.learning_rate", ("lr",), real),
    ("optimizer.weight_decay", ("weight_decay",), real),
    ("optimizer.beta1", ("adam_beta1",), real),
    ("optimizer.beta2", ("adam_beta2",), real),
    ("optimizer.eps", ("adam_eps",), real),
    ("optimizer.clip_norm", ("clip_grad",), lambda value: real(value) or None),
    ("optimizer.warmup_steps", ("lr_warmup_iters",), int),
    ("parallelism.tensor", ("tensor_model_parallel_size",), whole),
    ("parallelism.pipeline", ("pipeline_model_parallel_size",), whole),
    ("parallelism.context", ("context_parallel_size",), whole),
    ("parallelism.expert", ("expert_model_parallel_size",), whole),
    ("ranks", ("world_size",), whole),
)


def _megatron(read: Reading) -> None:
    _take_all(read, _MEGATRON)
    _optimizer(read, "optimizer")
    _schedule(read, "lr_decay_style")
    swiglu = read.take("swiglu")[1]
    read.fields["model.feed_forward"] = "swiglu" if swiglu is not None and yes(swiglu) else "gelu"
    norm = str(read.take("normalization")[1] or "LayerNorm")
    read.fields["model.norm"] = "rms" if "rms" in norm.lower() else "layer"
    untied = read.take("untie_embeddings_and_output_weights")[1]
    read.fields["model.tie_embeddings"] = not (untied is not None and yes(untied))
    positions = str(read.take("position_embedding_type")[1] or "")
    rotary = read.take("use_rotary_position_embeddings")[1]
    read.fields["model.positions"] = "rope" if positions == "rope" or rotary else "learned"
    biases = read.take("disable_bias_linear", "add_bias_linear")
    without = (biases[0] == "disable_bias_linear") == yes(biases[1]) if biases[0] else False
    read.fields["model.biases"] = "none" if without else "all"
    grouped = read.take("group_query_attention")[1]
    if grouped is None or not yes(grouped):
        read.fields.pop("model.n_kv_heads", None)
    for name, ours in (("bf16", "bf16"), ("fp16", "fp16")):
        read.field("training.precision", name, how=lambda value, ours=ours: ours if yes(value) else None)
    read.fields.setdefault("training.precision", "fp32")
    fp8 = read.take("fp8_format", "fp8")[1]
    if fp8 is not None and str(fp8).lower() not in ("none", "false"):
        read.fields["training.precision"] = "fp8"
    granularity = read.take("recompute_granularity")[1]
    if granularity is not None:
        _recompute(read, "recompute_granularity")
    read.take("recompute_method", "recompute_num_layers", "sequence_parallel", "use_flash_attn", "attention_backend")
    sharded = read.take("use_distributed_optimizer")[1]
    if sharded is not None and yes(sharded):
        read.fields["parallelism.shard_optimizer"] = True
    fsdp = [read.take(name)[1] for name in ("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp")]
    if any(value is not None and yes(value) for value in fsdp):
        read.fields["training.parallelism"] = "fsdp"
    virtual = read.take("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    pipeline, layers = read.fields.get("parallelism.pipeline", 1), read.fields.get("model.n_layers")
    if virtual[1] is not None and pipeline > 1 and layers:
        per_rank = int(virtual[1]) if "stages" in virtual[0][-20:] and "virtual_stages" in virtual[0] else 0
        per_rank = per_rank or layers // pipeline // int(virtual[1])
        if per_rank > 1:
            read.fields.update({"parallelism.schedule": "interleaved-1f1b", "parallelism.stages_per_rank": per_rank})
    processes, nodes = read.take("nproc_per_node")[1], read.take("nnodes")[1]
    if processes is not None and "ranks" not in read.fields and str(processes).isdecimal():
        read.fields["ranks"] = int(processes) * (int(nodes) if str(nodes or 1).isdecimal() else 1)
        read.understood.append(Understood("nproc_per_node", processes, "ranks", read.fields["ranks"]))


def _verl(read: Reading) -> None:
    actor = "actor_rollout_ref.actor"
    _model(read, "actor_rollout_ref.model.path", "model.partial_pretrain", "model.path")
    prompts = read.field("batch", "data.train_batch_size", how=whole)
    answers = read.take("actor_rollout_ref.rollout.n")[1]
    if prompts and answers is not None and whole(answers):
        read.fields["batch"] = prompts * int(answers)
        read.understood.append(Understood("actor_rollout_ref.rollout.n", answers, "batch", read.fields["batch"]))
    lengths = [read.take(name)[1] for name in ("data.max_prompt_length", "data.max_response_length", "data.max_length")]
    total = sum(int(length) for length in lengths if length is not None)
    if total:
        read.fields["model.context_length"] = total
        read.understood.append(
            Understood("data.max_prompt_length + data.max_response_length", total, "model.context_length", total)
        )
    read.field("micro_batch", f"{actor}.ppo_micro_batch_size_per_gpu", "data.micro_batch_size_per_gpu", how=whole)
    mini = read.take(f"{actor}.ppo_mini_batch_size")[1]
    if mini is not None and prompts and whole(mini) and int(mini) < prompts:
        read.fields["batch"] = int(mini) * (int(answers) if answers is not None else 1)
        read.note(f"an update is planned, of which a rollout has {prompts // int(mini)}")
    read.field("optimizer.learning_rate", f"{actor}.optim.lr", "optim.lr", how=real)
    read.field("optimizer.weight_decay", f"{actor}.optim.weight_decay", "optim.weight_decay", how=real)
    read.field("optimizer.clip_norm", f"{actor}.grad_clip", "optim.clip_grad", how=real)
    read.field("training.steps", "trainer.total_training_steps", how=whole)
    _recompute(read, "actor_rollout_ref.model.enable_gradient_checkpointing", "model.enable_gradient_checkpointing")
    read.field(
        "parallelism.context", f"{actor}.ulysses_sequence_parallel_size", "ulysses_sequence_parallel_size", how=whole
    )
    strategy = str(read.take(f"{actor}.strategy")[1] or "fsdp")
    if strategy.startswith("fsdp"):
        read.fields["training.parallelism"] = "fsdp"
    else:
        for ours, theirs in (("tensor", "tensor"), ("pipeline", "pipeline"), ("expert", "expert")):
            read.field(f"parallelism.{ours}", f"{actor}.megatron.{theirs}_model_parallel_size", how=whole)
    offload = read.take(f"{actor}.fsdp_config.optimizer_offload", f"{actor}.fsdp_config.param_offload")[1]
    if offload is not None and yes(offload):
        read.fields["training.offload_optimizer"] = True
    read.fields["training.precision"] = "bf16"
    per_node, nodes = read.take("trainer.n_gpus_per_node")[1], read.take("trainer.nnodes")[1]
    if per_node is not None:
        read.fields["ranks"] = int(per_node) * int(nodes or 1)
        read.understood.append(Understood("trainer.n_gpus_per_node", per_node, "ranks", read.fields["ranks"]))
    if "algorithm.adv_estimator" in read.settings:
        read.note(
            "the update of the policy is planned; rollouts are a service: `napkin plan service`, `napkin tune rl`"
        )


STACKS: dict[str, tuple[Callable[[Reading], None], frozenset[str]]] = {
    "axolotl": (_axolotl, frozenset({"base_model", "sequence_len", "datasets", "micro_batch_size"})),
    "verl": (_verl, frozenset({"actor_rollout_ref.model.path", "trainer.n_gpus_per_node", "data.train_batch_size"})),
    "torchtitan": (_torchtitan, frozenset({"model.flavor", "training.seq_len", "job.dump_folder", "training.steps"})),
    "DeepSpeed": (
        read_deepspeed,
        frozenset({"zero_optimization.stage", "train_micro_batch_size_per_gpu", "train_batch_size", "bf16.enabled"}),
    ),
    "Megatron-LM": (_megatron, frozenset({"num_layers", "hidden_size", "num_attention_heads", "seq_length"})),
    "transformers": (
        _transformers,
        frozenset(
            {"per_device_train_batch_size", "gradient_accumulation_steps", "distributed_type", "num_processes"}
            | {"learning_rate", "output_dir", "model_name_or_path"}
        ),
    ),
}
"""For each stack, the reader of its settings, and settings that identify its files."""
