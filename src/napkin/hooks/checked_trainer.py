"""The gradient of transformers' `Trainer`, and so of TRL's trainers, in any arrangement: taken from `train()` itself.

    def trainer(**arrangement):
        return SFTTrainer(model, SFTConfig("out", packing=True, **arrangement), train_dataset=data)

For each arrangement the function is called with the arguments that make it, the trainer's data are replaced by the
examples that are compared, in order, and `train()` runs until its first update, which is not made.
"""

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.data import SequentialSampler

from napkin.errors import NapkinError
from napkin.hooks.checked_program import (
    Arrangement,
    Checked,
    Gradient,
    NotOffered,
    called,
    gradient_of,
    nudge_weights,
    remove_dropout,
    seed_all,
    spread_numbers,
)

QUIET: dict[str, Any] = {
    "max_steps": 1,
    "max_grad_norm": 0.0,
    "report_to": "none",
    "save_strategy": "no",
    "eval_strategy": "no",
    "disable_tqdm": True,
    "dataloader_drop_last": False,
}
"""The arguments of all arrangements: one update without clipping, and nothing written."""


class _Computed(BaseException):
    """Raised once the gradient is computed, to leave `train()` before the update."""


class CheckedTrainer(Checked):
    """A function that returns a trainer, as a program."""

    def __init__(self, make: Callable[..., Any], n_examples: int) -> None:
        self._make = make
        self._without_dropout = False
        self._state: dict[str, Tensor] = {}
        # With the author's arguments, to see whether it packs.
        own = self._made(Arrangement("own", (0,), 1))
        fields = {name for name in ("packing", "padding_free") if hasattr(own.args, name)}
        self.packings = tuple(name.replace("_", "-") for name in sorted(fields) if getattr(own.args, name))
        self._plain = dict.fromkeys(fields, False)
        plain = self._made(Arrangement("plain", (0,), 1)) if self.packings else own
        self._state = {name: value.detach().clone() for name, value in plain.model.state_dict().items()}
        self.on_cuda = any(parameter.is_cuda for parameter in plain.model.parameters())
        rows = plain.train_dataset
        if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
            raise NapkinError("the trainer's data are a stream: give it some of them as a list, to check")
        self.examples = [rows[number] for number in spread_numbers(rows, n_examples)]

    def gradient(
        self, arrangement: Arrangement, *, examples: Sequence[Any] | None = None, nudge: tuple[float, int] | None = None
    ) -> Gradient:
        trainer = self._made(arrangement)
        trainer.model.load_state_dict(self._state)
        if self._without_dropout:
            remove_dropout(trainer.model)
        if nudge is not None:
            nudge_weights(trainer.model, *nudge)
        examples = self.examples if examples is None else examples
        rows: Any = [examples[number] for number in arrangement.order]
        if arrangement.packing == "packing" and arrangement.packed:
            rows = self._packed(trainer, rows)
        trainer.train_dataset = rows
        trainer._get_train_sampler = lambda *_, **__: SequentialSampler(rows)
        trainer.add_callback(_stopping_callback(found := {}, trainer.model))
        seed_all(arrangement.seed)
        with contextlib.suppress(_Computed):
            called("train", trainer.train)
        if not found:
            raise NapkinError(f"train() ended before an update in '{arrangement.name}': give it enough data for one")
        return found

    def remove_dropout(self) -> list[str]:
        self._without_dropout = True
        return remove_dropout(self._made(Arrangement("own", (0,), 1)).model)

    def weights(self) -> dict[str, Tensor]:
        return self._state

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._state = {**self._state, **weights}

    def _made(self, arrangement: Arrangement) -> Any:
        import torch

        of_rank = len(arrangement.own_micro_batches)
        arguments = {
            **QUIET,
            **getattr(self, "_plain", {}),
            "per_device_train_batch_size": arrangement.micro_batch_size,
            "gradient_accumulation_steps": of_rank,
            "seed": 1 + arrangement.seed,
            "use_cpu": not torch.cuda.is_available(),
        }
        if arrangement.packed:
            arguments[arrangement.packing.replace("-", "_")] = True
            # Packing makes fewer rows, and all of them are one micro-batch.
        seed_all(0)
        trainer = called("trainer", self._make, **arguments)
        if not (hasattr(trainer, "training_step") and isinstance(getattr(trainer, "model", None), nn.Module)):
            raise NapkinError(
                f"trainer() returns a {type(trainer).__name__}: return transformers' Trainer, or one of TRL's"
            )
        given = (trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps)
        if given != (arrangement.micro_batch_size, of_rank):
            raise NapkinError(
                f"trainer() has micro-batches of {given[0]}, {given[1]} of them, and was asked for "
                f"{arrangement.micro_batch_size} and {of_rank}: pass its keyword arguments on to the TrainingArguments"
            )
        return trainer

    def _packed(self, trainer: Any, rows: Sequence[Any]) -> Any:
        """Rows packed by the trainer's own method."""
        prepare = getattr(trainer, "_prepare_dataset", None)
        if prepare is None:
            raise NotOffered(f"{type(trainer).__name__} packs in a way that is not known")
        from datasets import Dataset  # pyright: ignore[reportMissingImports]

        named = inspect.signature(prepare).parameters
        settings = {
            "processing_class": trainer.processing_class,
            "args": trainer.args,
            "packing": True,
            "formatting_func": None,
            "dataset_name": "checked",
        }
        known = {name: value for name, value in settings.items() if name in named}
        packed = called("_prepare_dataset", prepare, Dataset.from_list(list(rows)), **known)
        if len(packed) > trainer.args.per_device_train_batch_size:
            raise NotOffered(f"packing makes {len(packed)} rows of {len(rows)} examples: raise max_length")
        trainer.args.per_device_train_batch_size = len(packed)
        trainer._train_batch_size = len(packed)
        return packed


def _stopping_callback(found: Gradient, model: nn.Module) -> Any:
    from transformers import TrainerCallback  # pyright: ignore[reportMissingImports]

    class Stopping(TrainerCallback):
        """Takes the gradient, and leaves `train()` before the update."""

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found.update(gradient_of(model))
            raise _Computed

    return Stopping()
