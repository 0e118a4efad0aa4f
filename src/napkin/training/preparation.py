"""What happens before a run: its files are opened, its recipe resolved for this machine, its step planned."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from napkin.accounting.ledger import Ledger
from napkin.accounting.plan import Plan
from napkin.accounting.price import price
from napkin.accounting.rules import parameters_rule
from napkin.data.batches import Batches
from napkin.data.token_file import TokenFile
from napkin.errors import NapkinError
from napkin.hardware.calibration import Calibration
from napkin.hardware.calibration_cache import calibration_of_this_machine
from napkin.hardware.host import Host, detect_host
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.storage import load_tokenizer
from napkin.training.precision import Precision, choose_device, choose_precision
from napkin.training.recipe import Recipe
from napkin.training.step import count_step
from napkin.units import format_bytes

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Preparation:
    """Everything a run needs, opened and checked; nothing of the model is allocated yet."""

    recipe: Recipe
    """Resolved: no "auto" and no default is left in it that this machine or these files decide."""
    tokenizer: Tokenizer
    train_tokens: TokenFile
    validation_tokens: TokenFile | None
    precision: Precision
    plan: Plan

    @property
    def batches(self) -> Batches:
        """The training batches, in their order."""
        training = self.recipe.training
        return Batches(
            self.train_tokens,
            context_length=self.recipe.model.context_length,
            batch_size=training.batch_size,
            seed=training.data_seed,
        )


def prepare(
    recipe: Recipe, *, tokenizer: Tokenizer | None = None, progress: Progress = lambda doing: None
) -> Preparation:
    """Open what the recipe names, check that it fits together, and plan the run on this machine.

    `tokenizer` stands in for the file that the recipe names: a run keeps its own copy. `progress` is told what is
    being done. Raises NapkinError for files that are missing, damaged or do not belong together.
    """
    tokenizer = tokenizer or load_tokenizer(recipe.data.tokenizer)
    progress("checking the token files")
    train_tokens = _open_tokens(recipe.data.train, tokenizer, recipe)
    validation_tokens = _open_tokens(recipe.data.validation, tokenizer, recipe) if recipe.data.validation else None
    host = detect_host()
    recipe, precision = resolve(recipe, tokenizer.vocab_size, host)
    preparation = Preparation(
        recipe, tokenizer, train_tokens, validation_tokens, precision, make_plan(recipe, precision, host, progress)
    )
    # Refuses a text that is shorter than one window, before anything is made.
    _ = preparation.batches
    return preparation


def resolve(recipe: Recipe, vocab_size: int, host: Host) -> tuple[Recipe, Precision]:
    """Fill in what the tokenizer and the machine decide."""
    if recipe.model.vocab_size not in (0, vocab_size):
        raise NapkinError(
            f"model.vocab_size is {recipe.model.vocab_size}, the tokenizer has {vocab_size}: "
            "leave the field out or use that number"
        )
    device_type = choose_device(recipe.training.device)
    precision = choose_precision(recipe.training.precision, device_type, host)
    training = dataclasses.replace(
        recipe.training,
        device=device_type,
        precision=precision.products,
        threads=recipe.training.threads or host.cores,
    )
    model = dataclasses.replace(recipe.model, vocab_size=vocab_size)
    return dataclasses.replace(recipe, model=model, training=training), precision


def make_plan(recipe: Recipe, precision: Precision, host: Host, progress: Progress = lambda doing: None) -> Plan:
    """Count and price a resolved recipe's step on this machine."""
    assert recipe.training.threads is not None
    torch.set_num_threads(recipe.training.threads)
    progress("measuring this machine, once")
    calibration = calibration_of_this_machine(precision.device_type)
    progress("counting the step")
    return _plan(recipe, precision, count_step(recipe, precision), calibration, host)


def refuse_what_does_not_fit(recipe: Recipe, precision: Precision, plan: Plan) -> None:
    """Raise NapkinError, with a micro-batch that fits if there is one, where the plan exceeds the memory."""
    if plan.fits:
        return
    size = recipe.training.resolved_micro_batch_size
    way_out = "use a smaller --model.context-length or --model.d-model"
    while size > 1:
        size = max(divisor for divisor in range(1, size) if recipe.training.batch_size % divisor == 0)
        training = dataclasses.replace(recipe.training, micro_batch_size=size)
        needed = count_step(dataclasses.replace(recipe, training=training), precision).peak_bytes
        if needed <= plan.memory_bytes:
            way_out = f"with --training.micro-batch-size {size} it needs {format_bytes(needed)}"
            break
    raise NapkinError(
        f"a step needs {format_bytes(plan.ledger.peak_bytes)}, {plan.device_name} has "
        f"{format_bytes(plan.memory_bytes)} free: {way_out}"
    )


def _plan(recipe: Recipe, precision: Precision, ledger: Ledger, calibration: Calibration, host: Host) -> Plan:
    model = recipe.model
    on_cpu = precision.device_type == "cpu"
    return Plan(
        ledger=ledger,
        price=price(ledger, calibration),
        rule_parameters=parameters_rule(
            vocab_size=model.vocab_size, d_model=model.d_model, n_layers=model.n_layers, tied=model.tie_embeddings
        ),
        steps=recipe.training.steps,
        tokens_per_step=recipe.tokens_per_step,
        device_name=host.cpu_name if on_cpu else host.accelerators[0].name,
        matmul_peak=calibration.matmul_peak(precision.products),
        memory_bytes=_free_bytes(host) if on_cpu else torch.cuda.mem_get_info()[0],
    )


def _free_bytes(host: Host) -> int:
    return min(host.available_bytes, psutil.virtual_memory().available)


def _open_tokens(path: str, tokenizer: Tokenizer, recipe: Recipe) -> TokenFile:
    return TokenFile.open(path, tokenizer_fingerprint=tokenizer.fingerprint, verify=recipe.data.verify)
