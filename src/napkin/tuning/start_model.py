"""The model that tuning starts from: a run of napkin, or a Hugging Face folder; and a frozen copy to compare with."""

import dataclasses
from collections.abc import Callable
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path

import torch

from napkin.chats.chat_format import ChatFormat, chat_format
from napkin.chats.chat_template import ChatTemplate, read_chat_template, read_first_ids
from napkin.chats.run_texts import run_texts
from napkin.checkpoint.folder import checkpoint_paths
from napkin.checkpoint.restore import keeps_average, load_newest, load_plain_model
from napkin.checkpoint.shard_files import FROZEN, checksum_of, read_sums
from napkin.checkpoint.state import Checkpoint, load_frozen
from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.inference.pretrained import is_pretrained
from napkin.inference.settings import read_generation_config
from napkin.model.config import ModelConfig
from napkin.model.huggingface.convert import (
    load_huggingface_into,
    read_huggingface_config,
    refuse_other_function,
    weight_files,
)
from napkin.model.transformer import Transformer
from napkin.recipe.precision import Precision
from napkin.recipe.tuning_recipe import TuningRecipe
from napkin.runs.model_files import ConversationFile, is_quantized
from napkin.runs.run_folder import RunFolder, is_run
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.interchange.huggingface import read_huggingface
from napkin.train_step.tuned_model import adapter_of


@dataclasses.dataclass(frozen=True)
class StartModel:
    """A model whose weights are not read yet, with what turns texts into its tokens."""

    folder: Path
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """Its own; None if it has none."""
    first_ids: tuple[int, ...]
    """Tokens before every text; a chat template writes its own."""
    stop_ids: tuple[int, ...]
    """Tokens at which a text ends."""

    @property
    def chat(self) -> ChatFormat:
        """How conversations become its tokens."""
        return chat_format(self.tokenizer, self.chat_template, self.first_ids)

    def conversation_file(self, chat_template: ChatTemplate | None = None) -> ConversationFile:
        """What a run that starts from it writes as conversation.json; None is its own template, if it has one."""
        template = chat_template or self.chat_template
        known = (None, {}) if template is None else (template.source, dict(template.special_tokens))
        return ConversationFile("napkin-conversation", 1, self.first_ids, self.stop_ids, *known)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of the checksums of the files that hold the weights; reads them once.

        Raises CorruptFile where they are damaged.
        """
        if self.checkpoint is None:
            checksums = [checksum_of(path) for path in weight_files(self.folder)]
        else:
            stems = ("model", "optimizer", FROZEN) if keeps_average(self.checkpoint) else ("model", FROZEN)
            checksums = [sum for name, sum in read_sums(self.checkpoint.path).items() if name.startswith(stems)]
        return sha256(" ".join(checksums).encode()).hexdigest()

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """The newest intact checkpoint of a run, whose checksums were verified; None of a Hugging Face folder."""
        if not is_run(self.folder):
            return None
        found, _ = load_newest(RunFolder(self.folder).checkpoints, lambda checkpoint: None)
        if found is None:
            raise _no_checkpoint(self.folder)
        return found

    def load_into(self, model: Transformer) -> None:
        """Copy the weights into a model of the same config, in its dtype and on its device; of a run those of its
        newest intact checkpoint, averaged ones if it has any, with adapters merged.

        Raises NapkinError where the config differs in what it computes, CorruptFile where the weights are damaged; the
        model is unchanged then.
        """
        refuse_other_function(model.config, self.config, str(self.folder))
        if self.checkpoint is None:
            load_huggingface_into(model, self.folder)
            return
        loaded = load_plain_model(self.checkpoint, RunFolder(self.folder).recipe)
        targets = dict(model.named_parameters())
        with torch.no_grad():
            for name, parameter in loaded.named_parameters():
                targets[name].copy_(parameter)

    def refuse_other_tokenizer(self, tokenizer: Tokenizer, whose: str) -> None:
        """Raise NapkinError where another tokenizer's tokens would be other texts here: a model that is compared with
        another, or trained from it, has the same vocabulary."""
        if tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise NapkinError(
                f"'{self.folder}' has another tokenizer ({self.tokenizer.vocab_size:,} tokens) than {whose} "
                f"({tokenizer.vocab_size:,}): use a model with the same one"
            )


def open_start(folder: StrPath) -> StartModel:
    """Open a run, or a Hugging Face folder with tokenizer.json, without reading weights.

    Raises NapkinError for a folder that is neither, is quantized, or has no checkpoint yet.
    """
    path = Path(folder)
    if not str(folder):
        raise NapkinError("no model to start from is named: give a run or a Hugging Face folder")
    if not path.is_dir():
        raise NapkinError(f"there is no folder '{path}': name a run or a Hugging Face folder to start from")
    if is_quantized(path):
        raise NapkinError(f"'{path}' is quantized, and integers are not trained: start from the run it was made of")
    if is_run(path):
        return _start_of_run(path)
    if is_pretrained(path):
        return _start_of_huggingface(path)
    raise NapkinError(f"'{path}' is neither a run nor a Hugging Face folder (config.json): name one of them")


def reference_model(start: StartModel, precision: Precision) -> Transformer:
    """The start's model, frozen, on the precision's device: what a tuned model is compared with."""
    model = Transformer(start.config)
    start.load_into(model)
    model.requires_grad_(False).eval()
    return model.to(precision.device_type)


def initial_weights(run: Path, recipe: TuningRecipe) -> Callable[[Transformer], None]:
    """What copies the weights that a run starts from into a model: frozen ones are in its own folder, once that is
    there; others are those of the start. Raises NapkinError where there is none."""
    if adapter_of(recipe) is not None and is_run(run):
        return partial(load_frozen, RunFolder(run).checkpoints)
    return open_start(recipe.tuning.start).load_into


def _start_of_run(path: Path) -> StartModel:
    run = RunFolder.open(path)
    if not checkpoint_paths(run.checkpoints):
        raise _no_checkpoint(path)
    tokenizer = run.tokenizer
    texts = run_texts(path, tokenizer)
    return StartModel(path, run.recipe.model, tokenizer, texts.chat_template, texts.first_ids, texts.stop_ids)


def _start_of_huggingface(path: Path) -> StartModel:
    if not (path / "tokenizer.json").is_file():
        raise NapkinError(f"'{path}' has no tokenizer.json: texts cannot be turned into tokens without it")
    tokenizer = read_huggingface(path / "tokenizer.json", drop_template=True)
    config = read_huggingface_config(path)
    if tokenizer.vocab_size > config.vocab_size:
        raise NapkinError(
            f"'{path}' has a tokenizer of {tokenizer.vocab_size} ids and a model of {config.vocab_size}: "
            "download it again"
        )
    stop_ids = tuple(read_generation_config(path).stop_ids)
    return StartModel(path, config, tokenizer, read_chat_template(path), read_first_ids(path, tokenizer), stop_ids)


def _no_checkpoint(path: Path) -> NapkinError:
    return NapkinError(f"'{path}' has no checkpoint yet: train it with `napkin resume {path}`")
