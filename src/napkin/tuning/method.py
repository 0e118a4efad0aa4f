"""`tune`, and the common part of all tuning: the base model, a frozen copy of it, and conversations as tokens."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from napkin.chats.chat_encoder import ChatEncoder, TrainOn
from napkin.chats.chat_template import ChatTemplate, read_template_file, read_template_variables, texts_of_run
from napkin.checkpoint.state import load_frozen, write_frozen
from napkin.data.token_file import SEPARATOR
from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.inference.loaded_model import LoadedModel, load
from napkin.model.transformer import Transformer
from napkin.planning.planner import resolve
from napkin.planning.step.machine import Progress
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.toml_file import read_recipe
from napkin.recipe.tuning_recipe import TuningRecipe
from napkin.runs.metrics import StepMetrics
from napkin.runs.run_folder import RunFolder, conversation_files, is_quantized, is_run
from napkin.tokenizer.base import Tokenizer
from napkin.train_step.step import Initialize, adapter_of, build_model
from napkin.training.method import Method, Setting
from napkin.training.run import Outcome, train
from napkin.tuning.packing import Packing, resolved_packing
from napkin.tuning.sequence_step import refuse_divided_models


def tune(
    recipe: TuningRecipe | StrPath,
    folder: StrPath,
    *,
    on_step: Callable[[StepMetrics], None] = lambda metrics: None,
    on_message: Callable[[str], None] = lambda message: None,
    progress: Progress = lambda doing: None,
) -> Outcome:
    """Plan, train and reconcile a run of tuning in `folder`: start it, or resume it if it exists.

    `recipe` is the recipe, or its TOML file; all else is as in `napkin.train`. Raises NapkinError for a recipe of
    pre-training, and as `napkin.train` does.
    """
    chosen = recipe if isinstance(recipe, Recipe) else read_recipe(recipe)
    if not isinstance(chosen, TuningRecipe):
        raise NapkinError(f"'{recipe}' has no [tuning]: it is a recipe of pre-training, train it with `napkin train`")
    return train(chosen, folder, on_step=on_step, on_message=on_message, progress=progress)


@dataclass(frozen=True)
class TuningContext:
    """Everything that a tuning method is built from, whether its run starts or resumes."""

    resolved: ResolvedRecipe
    """The recipe, with the base model's [model]."""
    tokenizer: Tokenizer
    encoder: ChatEncoder
    folder: Path
    """The run's folder. A new run creates it after the method, which may read its own files there later."""
    setting: Setting
    base: LoadedModel | None = None
    """The base model of a new run; None when a run is resumed, which has weights of its own."""

    @property
    def recipe(self) -> TuningRecipe:
        recipe = self.resolved.recipe
        assert isinstance(recipe, TuningRecipe)
        return recipe


MICRO_BATCH_TOKENS = 4096
"""Tokens of a forward and backward pass, where a recipe names no number."""


class TuningMethod(Method):
    """The common part of supervised tuning, preferences, reward models and reinforcement learning."""

    def __init__(self, context: TuningContext) -> None:
        super().__init__(context.resolved, context.tokenizer, ranks=context.setting.ranks)
        self.context = context
        self.max_tokens = context.recipe.tuning.micro_batch_tokens or MICRO_BATCH_TOKENS
        """The size of a micro-batch, padding included."""
        self.packing: Packing = resolved_packing(
            context.recipe.tuning.arrangement, context.resolved.precision.device_type
        )

    @classmethod
    @abstractmethod
    def open(cls, context: TuningContext) -> "TuningMethod":
        """Open the models and files that the recipe names. Raises NapkinError for one that cannot be used."""

    @classmethod
    def begin(cls, recipe: Recipe, folder: Path, setting: Setting) -> "TuningMethod":
        assert isinstance(recipe, TuningRecipe)
        recipe.tracking.refuse_missing()
        base = open_base(recipe.tuning.start)
        training = replace(recipe.training, compile="off")
        if recipe.training.compile == "on":
            raise NapkinError("training.compile is 'on', and the sequences of tuning differ in length: leave it out")
        if training.micro_batch_size is not None:
            raise NapkinError(
                f"training.micro_batch_size is {training.micro_batch_size!r}, and sequences differ in length: use "
                "--tuning.micro-batch-tokens"
            )
        resolved = resolve(
            replace(recipe, model=base.config, training=training), setting.machine(recipe), progress=setting.progress
        )
        refuse_divided_models(resolved.layout)
        encoder = encoder_of_base(base, recipe.tuning.chat_template, recipe.tuning.learned)
        return cls.open(TuningContext(resolved, base.tokenizer, encoder, folder, setting, base))

    @classmethod
    def reopen(cls, run: RunFolder, recipe: Recipe, setting: Setting) -> "TuningMethod":
        assert isinstance(recipe, TuningRecipe)
        resolved = resolve(recipe, setting.machine(recipe), progress=setting.progress)
        encoder = encoder_of_run(run.path, run.tokenizer, recipe.tuning.learned)
        return cls.open(TuningContext(resolved, run.tokenizer, encoder, run.path, setting))

    @property
    def initialize(self) -> Initialize:
        """Copies the initial weights into the model: frozen ones that the run keeps, or the base model's."""
        context = self.context
        if context.base is not None and adapter_of(context.recipe) is None:
            return context.base.load_parts
        return initial_weights(context.folder, context.recipe)

    def run_files(self) -> dict[str, bytes]:
        assert self.context.base is not None
        return conversation_files_of(self.context.encoder, self.context.base)

    def write_weights(self, checkpoints: Path) -> None:
        """Keep the base model's weights in the run, where only adapters are trained."""
        if adapter_of(self.context.recipe) is not None:
            assert self.context.base is not None
            self.context.setting.progress("keeping the frozen weights")
            write_frozen(checkpoints, build_model(self.resolved, self.context.base.load_parts))


def open_base(folder: StrPath) -> LoadedModel:
    """Open a run, a Hugging Face folder or a GGUF file, whose weights can be trained, without reading them.

    Raises NapkinError as `napkin.load` does, and for a quantized run.
    """
    if not str(folder):
        raise NapkinError("no model to start from is named: give a run, a Hugging Face folder or a GGUF file")
    if is_quantized(Path(folder)):
        raise NapkinError(f"'{folder}' is quantized, and integers are not trained: start from the run it was made of")
    return load(folder)


def reference_model(base: LoadedModel, precision: Precision) -> Transformer:
    """The base model, frozen, on the precision's device, to compare a tuned model with."""
    model = Transformer(base.config)
    base.load_into(model)
    model.requires_grad_(False).eval()
    return model.to(precision.device_type)


def initial_weights(run: Path, recipe: TuningRecipe) -> Initialize:
    """Return a function that copies a run's initial weights into a model: frozen ones from the run's folder, once that
    exists, others from the base model. Raises NapkinError where there is none."""
    if adapter_of(recipe) is not None and is_run(run):
        return lambda config, parts: load_frozen(RunFolder(run).checkpoints, parts)
    return open_base(recipe.tuning.start).load_parts


def encoder_of_base(base: LoadedModel, chat_template: StrPath = "", train_on: TrainOn = "assistant") -> ChatEncoder:
    """The encoder for tuning a base model.

    The template is that of the file `chat_template`, or the model's own, or the built-in one. Raises NapkinError where
    it cannot be read, or the tokenizer lacks what the built-in one needs.
    """
    template = base.chat_template
    if chat_template:
        known = None if base.chat_template is None else dict(base.chat_template.special_tokens)
        if known is None:
            known = read_template_variables(base.folder) or _separators(base.tokenizer)
        template = ChatTemplate(read_template_file(chat_template), known)
    return ChatEncoder(base.tokenizer, template, base.start_ids, stop_ids=base.stop_ids, train_on=train_on)


def encoder_of_tokenizer(
    tokenizer: Tokenizer, chat_template: StrPath = "", train_on: TrainOn = "assistant"
) -> ChatEncoder:
    """The encoder for models that are trained from scratch with a tokenizer: their texts stand between separators."""
    separators = [tokenizer.special_tokens[SEPARATOR]] if SEPARATOR in tokenizer.special_tokens else []
    template = ChatTemplate(read_template_file(chat_template), _separators(tokenizer)) if chat_template else None
    return ChatEncoder(tokenizer, template, separators, stop_ids=separators, train_on=train_on)


def encoder_of_run(run: Path, tokenizer: Tokenizer, train_on: TrainOn = "assistant") -> ChatEncoder:
    """The encoder of a tuned run, by its conversation.json."""
    start_ids, stop_ids, template = texts_of_run(run, tokenizer)
    return ChatEncoder(tokenizer, template, start_ids, stop_ids=stop_ids, train_on=train_on)


def conversation_files_of(encoder: ChatEncoder, base: LoadedModel) -> dict[str, bytes]:
    """The files, by name, with which a tuned run is prompted as it was trained."""
    kept = base.conversation_file(encoder.template)
    return conversation_files(msgspec.structs.replace(kept, stop_ids=encoder.stop_ids))


def _separators(tokenizer: Tokenizer) -> dict[str, str]:
    return {"bos_token": SEPARATOR, "eos_token": SEPARATOR} if SEPARATOR in tokenizer.special_tokens else {}
