"""Training runs as other stacks' files describe them, read as recipes that can be planned.

A file says what it always said; what it means here is a table for each stack (`STACKS`): their setting, our field, and
how its value is read. Nothing is dropped in silence: a `ForeignRun` names what was understood, as what, and every
setting that has no part in a plan.

Read are files of axolotl and verl (YAML), transformers' TrainingArguments (YAML or JSON) with accelerate's YAML beside
them, DeepSpeed (JSON), torchtitan (TOML) and the arguments of Megatron-LM (a shell script, or YAML).
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from napkin.errors import NapkinError
from napkin.files import StrPath, read_bounded
from napkin.model.config import ModelConfig
from napkin.recipe.foreign_stacks import STACKS, Reading, Settings, Understood, read_deepspeed
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import OptimizerConfig, ParallelismConfig, TrainingConfig
from napkin.toml_files import MOST_BYTES, parse_toml

PROGRAMS = {
    "torchtitan": "torchtitan",
    "Megatron-LM": "megatron",
    "DeepSpeed": "deepspeed",
    "transformers": "transformers",
    "axolotl": "transformers",
    "verl": "transformers",
}
"""The program that trains, as `napkin plan --stack` names it, of each kind of files; axolotl and verl train models of
transformers."""
MOST_SETTINGS = 10_000
MOST_DEPTH = 20


@dataclass(frozen=True)
class ForeignRun:
    """A run as files of another stack describe it."""

    stack: str
    recipe: Recipe
    ranks: int | None
    """Devices, where the files say how many."""
    understood: tuple[Understood, ...]
    given: frozenset[str]
    """The fields of the recipe that the files say, as "training.batch_size"."""
    ignored: tuple[str, ...]
    """Settings that a plan does not have: those of data, logging, or a technique that is not planned here."""
    notes: tuple[str, ...]
    """Settings that are planned differently from the files, and why."""
    program: str = "napkin"
    """The program that trains, as `napkin plan --stack` names it."""


def read_foreign(paths: Sequence[StrPath], base: Recipe | None = None, *, ranks: int | None = None) -> ForeignRun:
    """Read a run from the files of another stack: one, or the arguments of a trainer and the file of its launcher.

    Args:
        paths: the files; where two say the same, the later one counts.
        base: the recipe that they change; with a model for files that name none.
        ranks: the devices that it runs on; None is what the files say.

    Raises NapkinError for a file that cannot be read, is of no stack that is known, or has a value that has no meaning.
    """
    settings: Settings = {}
    for path in paths:
        settings.update(_flat(_parse(Path(path)), str(path)))
    stack = _stack_of(settings, paths)
    read = Reading(settings)
    STACKS[stack][0](read)
    if stack == "transformers" and STACKS["DeepSpeed"][1] & settings.keys():
        read_deepspeed(read)
    if "model" in read.fields and "model.context_length" not in read.fields:
        longest = read.fields["model"].context_length
        read.note(f"no setting says how long sequences are: {longest:,} tokens, or --model.context-length")
    try:
        recipe, ranks = _recipe(read, Recipe() if base is None else base, ranks)
    except NapkinError as error:
        named = ", ".join(f"'{path}'" for path in paths)
        raise NapkinError(f"{named}: {error}") from None
    given = frozenset(name for name in read.fields if "." in name) | {"training.batch_size", "training.parallelism"}
    ignored = tuple(name for name in settings if name not in read.used)
    by_deepspeed = bool(STACKS["DeepSpeed"][1] & settings.keys()) or bool(settings.get("deepspeed"))
    return ForeignRun(
        stack,
        recipe,
        ranks,
        tuple(read.understood),
        given,
        ignored,
        tuple(read.notes),
        "deepspeed" if by_deepspeed else PROGRAMS[stack],
    )


def _recipe(read: Reading, base: Recipe, asked: int | None) -> tuple[Recipe, int | None]:
    fields = read.fields
    tables: dict[str, dict[str, Any]] = {"model": {}, "training": {}, "optimizer": {}, "parallelism": {}}
    for name, value in fields.items():
        table, dot, field = name.partition(".")
        if dot:
            tables[table][field] = value
    model = dataclasses.replace(fields.get("model", base.model), **tables["model"])
    layout = tables["parallelism"]
    split = layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("context", 1)
    said = layout.get("data", 1) * layout["shard"] * split if "shard" in layout else None
    ranks = asked or fields.get("ranks") or said
    if ranks is not None and ranks % split:
        raise NapkinError(f"{ranks} ranks do not divide into groups of {split} (tensor · pipeline · context)")
    copies = None if ranks is None else ranks // split
    micro, batch, times = fields.get("micro_batch"), fields.get("batch"), fields.get("accumulation", 1)
    if batch is None and micro is not None:
        batch = micro * times * (copies or 1)
    if batch is not None:
        tables["training"]["batch_size"] = batch
        tables["training"]["micro_batch_size"] = min(micro or max(1, batch // (copies or 1) // times), batch)
    sharded = tables["training"].get("parallelism") == "fsdp"
    if copies is not None and (split > 1 or "data" in layout or "shard" in layout):
        if sharded:
            layout.setdefault("data", 1)
            layout.setdefault("shard", copies // layout["data"])
        else:
            layout.setdefault("data", copies)
    try:
        recipe = dataclasses.replace(
            base,
            model=model,
            training=dataclasses.replace(base.training, **tables["training"]),
            optimizer=dataclasses.replace(base.optimizer, **tables["optimizer"]),
            parallelism=dataclasses.replace(base.parallelism, **layout),
        )
        # Only the types of values remain to be checked.
        for table, kind in (
            (recipe.training, TrainingConfig),
            (recipe.optimizer, OptimizerConfig),
            (recipe.parallelism, ParallelismConfig),
            (recipe.model, ModelConfig),
        ):
            msgspec.convert(dataclasses.asdict(table), kind)
    except (TypeError, msgspec.ValidationError) as error:
        raise NapkinError(f"a value is of another type than it can have: {error}") from None
    if "steps" in tables["training"]:
        recipe = recipe.with_steps(tables["training"]["steps"])
    return recipe, ranks


def _stack_of(settings: Settings, paths: Sequence[StrPath]) -> str:
    """The stack to which most of the settings belong."""
    matches = {name: len(known & settings.keys()) for name, (_, known) in STACKS.items()}
    best = max(matches, key=lambda name: matches[name])
    if not matches[best]:
        raise NapkinError(
            f"'{paths[0]}' is of no stack that is known ({', '.join(STACKS)}): none of its settings is one of theirs"
        )
    return best


def _parse(path: Path) -> Any:
    """A file's values by its ending: YAML, JSON, TOML; otherwise arguments as a shell has them."""
    what = "another stack's file"
    data = read_bounded(path, MOST_BYTES, what=what, too_large=f"name {what}")
    try:
        text = data.decode("utf-8-sig")
        match path.suffix.lower():
            case ".yaml" | ".yml":
                return _parse_yaml(text)
            case ".json":
                return json.loads(text)
            case ".toml":
                return parse_toml(text)
        return _arguments(text)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).partition("\n")[0]
        raise NapkinError(f"'{path}' cannot be read ({why}): correct it there") from None


def _parse_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from None


def _arguments(text: str) -> Settings:
    """The options of a command in a shell script, `--num-layers 32` or `--bf16`, by their names."""
    joined = re.sub(r"\\\r?\n", " ", text)
    variables = dict(re.findall(r"^\s*(?:export\s+)?(\w+)=[\"']?([\w./-]+)[\"']?\s*(?:#.*)?$", joined, re.MULTILINE))
    expanded = re.sub(r"\$\{?(\w+)\}?", lambda found: variables.get(found[1], found[0]), joined)
    # Quotes and parentheses hold options together, as in GPT_ARGS="--num-layers 4"; values have no spaces.
    words = re.sub(r"(?<!\S)#[^\n]*|[\"'()]", " ", expanded).split()
    settings: Settings = {}
    name = None
    for word in words:
        if word.startswith("--"):
            given, equals, value = word[2:].partition("=")
            name = given.replace("-", "_")
            settings[name] = value if equals else True
            name = None if equals else name
        elif name is not None and settings[name] is True:
            settings[name] = word
        else:
            name = None
    return settings


def _flat(values: Any, where: str) -> Settings:
    """The settings of tables within tables by their whole names; a list is one value."""
    if not isinstance(values, Mapping):
        raise NapkinError(f"'{where}' holds no settings: name another stack's file")
    flat: Settings = {}
    waiting: list[tuple[str, Any, int]] = [("", values, 0)]
    while waiting:
        prefix, table, depth = waiting.pop()
        for name, value in table.items():
            whole_name = f"{prefix}{name}"
            if isinstance(value, Mapping) and value:
                waiting.append((f"{whole_name}.", value, depth + 1))
            else:
                flat[whole_name] = value
        if len(flat) > MOST_SETTINGS or depth > MOST_DEPTH or len(waiting) > MOST_SETTINGS:
            raise NapkinError(f"'{where}' has more than {MOST_SETTINGS:,} settings, or tables in {MOST_DEPTH} tables")
    return flat
