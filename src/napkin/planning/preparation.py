"""What happens before a run: its files are opened, its recipe resolved for this machine, its step planned."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from napkin.accounting.ledger import Ledger
from napkin.accounting.microbenchmark import rehearse
from napkin.accounting.plan import Plan, Site
from napkin.accounting.price import Price, price, roofline_seconds
from napkin.accounting.rules import bytes_per_parameter, parameters_rule
from napkin.accounting.rules_table import Sizes
from napkin.data.batches import Batches
from napkin.data.mixing import TokenMixture
from napkin.data.token_file import TokenFile
from napkin.distributed.ranks import ALONE, Ranks
from napkin.errors import NapkinError
from napkin.hardware.calibration import Calibration
from napkin.hardware.calibration_cache import calibration_of_this_machine
from napkin.hardware.catalogue import Device, find_device
from napkin.hardware.cuda_target import Target
from napkin.hardware.host import Host, detect_host
from napkin.hardware.malloc import keep_freed_memory
from napkin.planning.kernel_choice import choose_kernels
from napkin.planning.micro_batch import largest_micro_batch, refuse_far_too_much
from napkin.planning.probe_run import time_slice
from napkin.recipe.per_device import exchanged, gathered_bytes, sharded, share_of
from napkin.recipe.precision import Precision, choose_device, choose_precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.train_files import paths_and_weights
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.tokenizer_file import load_tokenizer
from napkin.train_step.compile import choose_compiling, refuse_impossible_compiling, written_out
from napkin.train_step.step import count_step

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Preparation:
    """Everything a run needs, opened and checked; nothing of the model is allocated yet."""

    recipe: Recipe
    """Resolved: no "auto" and no default is left in it that this machine or these files decide."""
    tokenizer: Tokenizer
    train_tokens: TokenMixture
    validation_tokens: TokenFile | None
    precision: Precision
    plan: Plan
    ranks: Ranks = ALONE
    """The processes that train it."""

    @property
    def batches(self) -> Batches:
        """The training batches, in their order; of each the rows that are this process's."""
        return _batches(self.recipe, self.train_tokens, self.ranks)


def prepare(
    recipe: Recipe,
    *,
    tokenizer: Tokenizer | None = None,
    progress: Progress = lambda doing: None,
    ranks: Ranks = ALONE,
) -> Preparation:
    """Open what the recipe names, check that it fits together, and plan the run on this machine.

    `tokenizer` stands in for the file that the recipe names: a run keeps its own copy. `progress` is told what is
    being done. Raises NapkinError for files that are missing, damaged or do not belong together.
    """
    recipe.tracking.refuse_missing()
    data = recipe.data
    tokenizer = tokenizer or open_tokenizer(data.tokenizer)
    progress("checking the token files")
    paths, weights = paths_and_weights(data.train)
    way_out = "or name yours with --data.train"
    train_tokens = TokenMixture([_open_tokens(path, tokenizer, data.verify, way_out) for path in paths], weights)
    validation_tokens = None
    if data.validation is not None:
        way_out = "name yours with --data.validation, or do without: --data.validation None"
        validation_tokens = _open_tokens(data.validation, tokenizer, data.verify, way_out)
    host = detect_host()
    recipe, precision = resolve(recipe, tokenizer.vocab_size, host, ranks)
    # Refuses a text that is shorter than one window, before anything is measured or counted.
    _batches(recipe, train_tokens)
    plan = make_plan(recipe, precision, host, progress, ranks)
    recipe = written_out(recipe, plan)
    return Preparation(recipe, tokenizer, train_tokens, validation_tokens, precision, plan, ranks)


def resolve(recipe: Recipe, vocab_size: int, host: Host, ranks: Ranks = ALONE) -> tuple[Recipe, Precision]:
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
        precision=precision.name,
        threads=ranks.threads(recipe.training.threads, host.cores),
    )
    model = dataclasses.replace(recipe.model, vocab_size=vocab_size)
    optimizer = dataclasses.replace(recipe.optimizer.resolved, warmup_steps=recipe.warmup_steps)
    recipe = dataclasses.replace(recipe, model=model, optimizer=optimizer, training=training)
    recipe = choose_kernels(recipe, precision)
    refuse_impossible_compiling(recipe, precision, n_ranks=ranks.size)
    share = with_micro_batch(share_of(recipe, ranks.size), precision, _free_bytes_of_rank(precision, host, ranks))
    if recipe.training.micro_batch_size == "auto":
        size = share.training.micro_batch_size
        recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, micro_batch_size=size))
    return recipe, precision


def with_micro_batch(
    recipe: Recipe, precision: Precision, memory_bytes: int, *, target: Target | None = None
) -> Recipe:
    """The recipe with the micro-batch that "auto" stands for in so much memory; others are left as they are."""
    if recipe.training.offload_optimizer and precision.device_type == "cpu":
        raise NapkinError(
            "training.offload_optimizer is True, but the run is on a CPU, where the optimizer's state is in the host's "
            "memory anyway: leave it out"
        )
    if recipe.training.micro_batch_size != "auto":
        return recipe
    size = largest_micro_batch(recipe, precision, memory_bytes, target=target)
    return dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, micro_batch_size=size))


def make_plan(
    recipe: Recipe,
    precision: Precision,
    host: Host,
    progress: Progress = lambda doing: None,
    ranks: Ranks = ALONE,
) -> Plan:
    """Count and price a resolved recipe's step on this machine; with several ranks, the first one's part of it.

    Raises NapkinError where the step is so far beyond the memory that counting it in full would take minutes.
    """
    assert recipe.training.threads is not None
    torch.set_num_threads(recipe.training.threads)
    keep_freed_memory()
    progress("counting the step")
    tokens_per_step, recipe = recipe.tokens_per_step, share_of(recipe, ranks.size)
    free = _free_bytes_of_rank(precision, host, ranks)
    fsdp = ranks.size > 1 and recipe.training.parallelism == "fsdp"
    if not fsdp:
        refuse_far_too_much(recipe, precision, device_name(precision, host), free)
    ledger = count_step(recipe, precision)
    if fsdp:
        ledger = sharded(ledger, ranks.size, gathered_bytes(recipe, ledger.parameters, precision.bytes_per_number))
    elif ranks.size > 1:
        ledger = exchanged(ledger)
    progress("measuring this machine, once")
    calibration = calibration_of_this_machine(precision.device_type)
    priced = price(ledger, calibration)
    if ledger.peak_bytes <= free:
        priced = _rehearsed(recipe, precision, ledger, calibration, free, progress)
    accelerator = _in_catalogue(device_name(precision, host)) if precision.device_type != "cpu" else None
    return Plan(
        ledger=ledger,
        price=priced,
        site=Site(
            device_name=device_name(precision, host),
            matmul_peak=calibration.matmul_peak(precision.products) / _sharing(precision, ranks),
            memory_bytes=free,
            bytes_per_second=calibration.memory_bandwidth / _sharing(precision, ranks),
            n_devices=ranks.size,
            sharded=fsdp,
            usd_per_hour=ranks.size * accelerator.price.usd_per_hour if accelerator and accelerator.price else None,
            watts=ranks.size * accelerator.watts if accelerator and accelerator.watts else None,
            disturbed=calibration.disturbed,
        ),
        rule_parameters=rule_parameters(recipe),
        rule_bytes_per_parameter=rule_bytes_per_parameter(recipe, precision),
        steps=recipe.training.steps,
        tokens_per_step=tokens_per_step,
        compiling=choose_compiling(recipe, precision, ledger, calibration, n_ranks=ranks.size),
    )


def _sharing(precision: Precision, ranks: Ranks) -> int:
    """How many ranks share the device: those of one machine its processor, a GPU none."""
    return ranks.place.local_size if precision.device_type == "cpu" else 1


def _free_bytes_of_rank(precision: Precision, host: Host, ranks: Ranks) -> int:
    return free_bytes(precision, host) // _sharing(precision, ranks)


def _rehearsed(
    recipe: Recipe, precision: Precision, ledger: Ledger, calibration: Calibration, free: int, progress: Progress
) -> Price:
    progress("rehearsing the operators")
    rehearsed = rehearse(
        ledger,
        lambda row: roofline_seconds(row, calibration),
        device_type=precision.device_type,
        # An operator's tensors in the rehearsal, in a fraction of what the step may take in all.
        max_bytes=free // 4,
    )
    progress("training a slice of the model")
    between, factor = time_slice(recipe, precision, calibration, rehearsed, max_bytes=free // 2)
    return price(ledger, calibration, rehearsed, between=between, factor=factor)


def sizes_of(recipe: Recipe) -> Sizes:
    """The recipe's sizes, as rules of thumb ask for them."""
    model, training = recipe.model, recipe.training
    return Sizes(
        vocab_size=model.vocab_size,
        d_model=model.d_model,
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        n_kv_heads=model.resolved_n_kv_heads,
        d_ff=model.resolved_d_ff,
        tied=model.tie_embeddings,
        batch_size=training.resolved_micro_batch_size,
        sequences=training.batch_size,
        context_length=model.context_length,
    )


def rule_parameters(recipe: Recipe) -> int:
    """Parameters of the recipe's model by the closed form."""
    model = recipe.model
    return parameters_rule(
        vocab_size=model.vocab_size, d_model=model.d_model, n_layers=model.n_layers, tied=model.tie_embeddings
    )


def rule_bytes_per_parameter(recipe: Recipe, precision: Precision) -> int:
    """Bytes per parameter for weight, gradient and optimizer state by the closed form."""
    narrower = 2 * (4 - precision.weights_dtype.itemsize)
    return bytes_per_parameter(recipe.optimizer.name) - narrower


def _in_catalogue(name: str) -> Device | None:
    try:
        return find_device(name)
    except NapkinError:
        return None


def device_name(precision: Precision, host: Host) -> str:
    """The device that trains, as its maker calls it."""
    return host.cpu_name if precision.device_type == "cpu" else host.accelerators[0].name


def free_bytes(precision: Precision, host: Host) -> int:
    """What the device has for tensors now."""
    if precision.device_type == "cpu":
        return min(host.available_bytes, psutil.virtual_memory().available)
    return torch.cuda.mem_get_info()[0]


def open_tokenizer(path: str) -> Tokenizer:
    """The tokenizer that a recipe names; a NapkinError that says how to make one where it is missing."""
    if not Path(path).is_file():
        raise NapkinError(
            f"there is no tokenizer file '{path}': make one with `napkin tokenizer train TEXT`, "
            "or name yours with --data.tokenizer"
        )
    return load_tokenizer(path)


def _open_tokens(path: str, tokenizer: Tokenizer, verify: bool, way_out: str) -> TokenFile:
    if not Path(path).is_file():
        raise NapkinError(f"there is no token file '{path}': make it with `napkin tokenizer encode TEXT`, {way_out}")
    return TokenFile.open(path, tokenizer_fingerprint=tokenizer.fingerprint, verify=verify)


def _batches(recipe: Recipe, train_tokens: TokenMixture, ranks: Ranks = ALONE) -> Batches:
    return Batches(
        train_tokens,
        context_length=recipe.model.context_length,
        batch_size=recipe.training.batch_size,
        seed=recipe.training.data_seed,
        rows=ranks.rows(recipe.training.batch_size),
        separate_documents=recipe.data.separate_documents,
    )
