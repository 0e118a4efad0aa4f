"""Distillation: a student learns the distributions of a teacher that computes beside it, or was asked before.

The examples are conversations, as in supervised tuning, or a file of tokens, all of whose windows are trained on, as in
continued pre-training.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from napkin.chats.token_sequence import Example, TokenSequence
from napkin.data.token_file import TokenFile, sidecar_path
from napkin.distributed.parallel_model import TEACHER
from napkin.distributed.pipeline_stages import PackedRows
from napkin.errors import NapkinError
from napkin.files import StrPath, already_exists
from napkin.inference.loaded_model import LoadedModel
from napkin.kernels.loss.distillation import Distillation, LikeliestTokens, TaughtRows, WholeDistributions
from napkin.model.config import ModelConfig
from napkin.model.gguf.gguf_file import is_gguf
from napkin.model.kernel_forms import use_kernels
from napkin.model.transformer import TokenScores, Transformer
from napkin.planning.planner import resolve
from napkin.recipe.tuning_recipe import DistillationConfig, DistillationRecipe
from napkin.runs.run_folder import RunFolder
from napkin.tensors import sent_to
from napkin.tokenizer.base import Tokenizer
from napkin.train_step.step import TrainState
from napkin.training.loop import Callback, TrainingLoop
from napkin.training.method import Setting
from napkin.tuning.example_file import is_example_file
from napkin.tuning.example_method import ExampleMethod, supervised_examples
from napkin.tuning.method import MICRO_BATCH_TOKENS, TuningContext, encoder_of_base, open_base, reference_model
from napkin.tuning.packing import LazyExamples, SequenceMicroBatch, resolved_packing
from napkin.tuning.sequence_step import (
    BatchTotals,
    Metrics,
    Normalisation,
    Objective,
    normalised_sum,
    normalised_weights,
)
from napkin.tuning.teacher_file import TaughtExamples, TeacherFile, TeacherKey, write_teacher_file

TEACHER_JSON = "teacher.json"


@runtime_checkable
class Teacher(Protocol):
    """Whoever says how tokens are distributed."""

    def attach(self, train_state: TrainState) -> None:
        """Keep whatever it needs in memory beside the student."""
        ...

    def taught(self, part: SequenceMicroBatch, rows: PackedRows) -> TaughtRows:
        """The teacher's distributions for a micro-batch's trained tokens; `rows` are its packed rows, real or fake."""
        ...


class ModelTeacher:
    """A teacher that computes beside the student, in fp32 weights and the student's products.

    Without `base` its weights are any: that of a plan.
    """

    def __init__(self, config: ModelConfig, base: LoadedModel | None = None) -> None:
        self.config, self.base = config, base
        self.model: Transformer | None = None

    def attach(self, train_state: TrainState) -> None:
        """Read its weights, and name them where meters look."""
        # Made where it stays: torch does not move all parameters of a plan, which are fake.
        model = Transformer(self.config, device=train_state.model.device)
        if self.base is not None:
            self.base.load_into(model)
        model = model.requires_grad_(False).eval()
        use_kernels(model, train_state.recipe.training.kernels)
        self.model = model
        held = {"weights": [*model.parameters(), *model.buffers()]}
        train_state.optimizer.state[TEACHER] = held  # pyright: ignore[reportArgumentType]

    def taught(self, part: SequenceMicroBatch, rows: PackedRows) -> TaughtRows:
        """Its distributions, as the hidden states that its head reads."""
        assert self.model is not None, "attach it first"
        with torch.no_grad():
            hidden = self.model.hidden(rows.inputs, rows.documents).flatten(0, 1).index_select(0, rows.places)
            return WholeDistributions(hidden, self.model.head_weight, self.model.config.logit_softcap)


class FileTeacher:
    """A teacher whose likeliest tokens are in a file; None in place of the file is that of a plan."""

    def __init__(self, top_k: int, file: TeacherFile | None = None) -> None:
        self.top_k, self.file = top_k, file

    def attach(self, train_state: TrainState) -> None:
        """Keep nothing in memory."""

    def taught(self, part: SequenceMicroBatch, rows: PackedRows) -> TaughtRows:
        """Its likeliest tokens, read from the file."""
        n, device = len(rows.targets), rows.targets.device
        if self.file is None:
            ids, log_probabilities = torch.zeros(n, self.top_k, dtype=torch.int32), torch.zeros(n, self.top_k + 1)
        else:
            places = self.file.rows_of(part)
            # Copies in torch's memory, as the plan has them.
            ids, log_probabilities = (
                torch.tensor(self.file.ids[places]),
                torch.tensor(self.file.log_probabilities[places]),
            )
        return LikeliestTokens(sent_to(device, ids), sent_to(device, log_probabilities))


@dataclass(frozen=True)
class DistillationObjective:
    """(1 - w) · -log p(token) + w · τ² · KL(teacher ‖ student), averaged by `normalisation`."""

    teacher: Teacher
    weight: float
    temperature: float
    normalisation: Normalisation = "token"
    constant: float | None = None

    def attach(self, train_state: TrainState) -> None:
        """Keep the teacher in memory beside the student."""
        self.teacher.attach(train_state)

    def teaching(self, part: SequenceMicroBatch) -> Callable[[PackedRows], Distillation]:
        """Return what computes the teacher's distributions of a micro-batch."""
        return lambda rows: Distillation(self.teacher.taught(part, rows), self.weight, self.temperature)

    def coefficients(self, part: SequenceMicroBatch, totals: BatchTotals) -> Float[Tensor, " token"]:
        return -normalised_weights(part, totals, self.normalisation, self.constant)

    def loss(
        self, part: SequenceMicroBatch, scores: TokenScores, totals: BatchTotals
    ) -> tuple[Float[Tensor, ""], Metrics]:
        assert scores.divergences is not None
        loss = scores.weighted_sum
        if loss is None:
            terms = (
                self.weight * self.temperature**2 * scores.divergences - (1 - self.weight) * scores.log_probabilities
            )
            loss = normalised_sum(terms, part, totals, self.normalisation, self.constant)
        sums = {
            "entropy": scores.entropies,
            "divergence": scores.divergences,
            "token loss": -scores.log_probabilities,
        }
        return loss, {name: value.detach().sum() / max(totals.tokens, 1) for name, value in sums.items()}


class TokenWindows(LazyExamples):
    """The tokens of a file in windows, each of which begins with the last token of the one before: all of a window but
    its first token are learned. A last, incomplete window is left out."""

    def __init__(self, file: TokenFile, length: int) -> None:
        self.file, self.length = file, length

    def __len__(self) -> int:
        return (self.file.n_tokens - 1) // self.length

    def example(self, number: int) -> Example:
        begin = number * self.length
        tokens = np.array(self.file.stretch(begin, begin + self.length + 1), dtype=np.int64)
        return (TokenSequence(tokens, np.arange(len(tokens)) > 0),)


def distilled_examples(
    context: TuningContext,
) -> tuple[Sequence[Example], Sequence[Example], str, int]:
    """The examples to learn and those held out, their checksum, and the length of the longest: of conversations, or of
    files of tokens."""
    data = context.recipe.data
    if not isinstance(data.train, str) or not is_token_file(data.train):
        return supervised_examples(context)
    tuning, limit = context.recipe.tuning, context.recipe.model.context_length
    for name in ("learned", "chat_template"):
        if getattr(tuning, name) != getattr(type(tuning)(), name):
            raise NapkinError(
                f"tuning.{name} is '{getattr(tuning, name)}', and '{data.train}' holds tokens: leave it out"
            )
    if not 0 <= tuning.max_length <= limit:
        raise NapkinError(
            f"tuning.max_length is {tuning.max_length:,}: use at most {limit:,}, the model's context length"
        )
    length = tuning.max_length or limit
    paths = [data.train, *([data.validation] if data.validation else [])]
    files = [TokenFile.open(path, tokenizer_fingerprint=context.tokenizer.fingerprint) for path in paths]
    for file in files:
        file.verify_on_read()
    train, *held_out = (TokenWindows(file, length) for file in files)
    checksum = sha256(" ".join([*(file.sha256 for file in files), str(length)]).encode()).hexdigest()
    return train, held_out[0] if held_out else (), checksum, length


def is_token_file(path: str) -> bool:
    """True for a file of `napkin encode` and the like, which has no loss mask."""
    return sidecar_path(Path(path)).is_file() and not is_example_file(path)


class DistillationMethod(ExampleMethod):
    """Trains on a teacher's distributions of the tokens of conversations or of a file of tokens."""

    def __init__(
        self,
        context: TuningContext,
        examples: Sequence[Example],
        held_out: Sequence[Example],
        checksum: str,
        objective: DistillationObjective,
        teacher: dict[str, str],
    ) -> None:
        super().__init__(context, examples, held_out, checksum, objective)
        self.distillation = objective
        self._teacher = teacher

    @classmethod
    def open(cls, context: TuningContext) -> "DistillationMethod":
        recipe = context.recipe
        assert isinstance(recipe, DistillationRecipe)
        config = recipe.distillation
        if not config.teacher:
            raise NapkinError(
                "no teacher is named: use --distillation.teacher with a run, a Hugging Face folder, a GGUF file, or a "
                "file of `napkin tune teach`"
            )
        train, held_out, checksum, longest = distilled_examples(context)
        temperature = config.temperature
        if Path(config.teacher).is_file() and not is_gguf(config.teacher):
            file = TeacherFile.open(config.teacher, vocab_size=recipe.model.vocab_size)
            _refuse_other_file(file, config, checksum, len(train) + len(held_out))
            teacher: Teacher = FileTeacher(file.top_k, file)
            known = {"teacher": file.key.name, "fingerprint": file.key.fingerprint, "file": file.checksum}
            train, held_out = TaughtExamples(train, file), TaughtExamples(held_out, file, len(train))
        else:
            base = open_teacher(config.teacher, context.tokenizer, recipe.model)
            teacher = ModelTeacher(base.config, base)
            known = {"teacher": config.teacher, "fingerprint": base.fingerprint}
        if context.base is None:
            _refuse_other_teacher(context.folder, known)
        objective = DistillationObjective(
            teacher, config.weight, temperature, recipe.tuning.normalisation, float(longest)
        )
        return cls(context, train, held_out, checksum, objective, known)

    def callbacks(self) -> list[Callback]:
        return [AttachTeacher(self.distillation)]

    def run_files(self) -> dict[str, bytes]:
        return {**super().run_files(), TEACHER_JSON: json.dumps(self._teacher, indent=2).encode()}

    @property
    def planned_objective(self) -> Objective:
        """The objective with a stand-in teacher of the same shape, without weights or file."""
        teacher = self.distillation.teacher
        if isinstance(teacher, ModelTeacher):
            return replace(self.distillation, teacher=ModelTeacher(teacher.config))
        assert isinstance(teacher, FileTeacher)
        return replace(self.distillation, teacher=FileTeacher(teacher.top_k))

    @property
    def teacher_config(self) -> ModelConfig | None:
        teacher = self.distillation.teacher
        return teacher.config if isinstance(teacher, ModelTeacher) else None


def teach(
    recipe: DistillationRecipe,
    path: StrPath,
    *,
    top_k: int,
    most_bytes: int | None = None,
    on_message: Callable[[str], None] = lambda message: None,
    progress: Callable[[str], None] = lambda doing: None,
) -> TeacherFile:
    """Write the likeliest tokens of `recipe.distillation.teacher` in place of each token that the recipe's student is
    to learn, of data.train and of data.validation; the file is `distillation.teacher` of any number of runs.

    Raises NapkinError as a run with that recipe does, and as `write_teacher_file`.
    """
    if Path(path).exists():
        raise already_exists(Path(path))
    setting = Setting(progress=progress, on_message=on_message)
    base = open_base(recipe.tuning.start)
    resolved = resolve(replace(recipe, model=base.config), setting.machine(recipe), progress=setting.progress)
    encoder = encoder_of_base(base, recipe.tuning.chat_template, recipe.tuning.learned)
    context = TuningContext(resolved, base.tokenizer, encoder, Path(path), setting, base)
    train, held_out, checksum, _ = distilled_examples(context)
    teacher = open_teacher(recipe.distillation.teacher, base.tokenizer, base.config)
    key = TeacherKey(checksum, recipe.distillation.teacher, teacher.fingerprint, recipe.distillation.temperature)
    model = reference_model(teacher, resolved.precision)
    with resolved.precision.autocast():
        write_teacher_file(
            path,
            model,
            ChainedExamples(train, held_out),
            key,
            top_k=top_k,
            max_tokens=recipe.tuning.micro_batch_tokens or MICRO_BATCH_TOKENS,
            packing=resolved_packing(recipe.tuning.arrangement, resolved.precision.device_type),
            most_bytes=most_bytes,
            progress=lambda done, of: progress(f"{done:,} of {of:,} tokens"),
        )
    return TeacherFile.open(path, vocab_size=base.config.vocab_size)


class ChainedExamples(LazyExamples):
    """Two lists of examples as one."""

    def __init__(self, *parts: Sequence[Example]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def example(self, number: int) -> Example:
        for part in self.parts:
            if number < len(part):
                return part[number]
            number -= len(part)
        raise IndexError(number)


class AttachTeacher(Callback):
    """Reads a teacher's weights before the first step."""

    def __init__(self, objective: DistillationObjective) -> None:
        self.objective = objective

    def on_start(self, loop: TrainingLoop) -> None:
        self.objective.attach(loop.train_state)


def open_teacher(folder: str, tokenizer: Tokenizer, student: ModelConfig) -> LoadedModel:
    """Open a teacher. Raises NapkinError where it has other tokens than the student, or a shorter context."""
    base = open_base(folder)
    base.refuse_other_tokenizer(tokenizer, "the student")
    if base.config.vocab_size != student.vocab_size:
        raise NapkinError(
            f"'{folder}' has logits for {base.config.vocab_size:,} tokens, the student for {student.vocab_size:,}: use "
            "a teacher whose vocabulary is padded to the same size"
        )
    if base.config.context_length < student.context_length:
        raise NapkinError(
            f"'{folder}' has a context of {base.config.context_length:,} tokens, the student one of "
            f"{student.context_length:,}: use a teacher that sees as many"
        )
    return base


def _refuse_other_file(file: TeacherFile, config: DistillationConfig, checksum: str, n_sequences: int) -> None:
    if file.key.examples != checksum or file.n_sequences != n_sequences:
        raise NapkinError(
            f"'{file.path}' was made from other examples than data.train and data.validation, or from other tokens of "
            "them: make it with `napkin tune teach` from the same files and settings"
        )
    if file.key.temperature != config.temperature:
        raise NapkinError(
            f"'{file.path}' was computed at temperature {file.key.temperature:g}, distillation.temperature is "
            f"{config.temperature:g}: use that of the file, or make another"
        )


def _refuse_other_teacher(run: Path, known: dict[str, str]) -> None:
    """Raise NapkinError where a run that is resumed would go on with another teacher."""
    kept = RunFolder(run).read_json(TEACHER_JSON) or {}
    for name in ("fingerprint", "file"):
        if kept.get(name) != known.get(name):
            raise NapkinError(
                f"'{known['teacher']}' has changed since '{run}' began to learn from it: bring back what it was, or "
                "start a new run"
            )
