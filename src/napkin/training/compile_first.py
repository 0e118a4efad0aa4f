"""Compiles the blocks before the first step, so that compilation is timed apart from the steps."""

import threading
from collections.abc import Callable

import torch

from napkin.accounting.metering import Stopwatch
from napkin.errors import NapkinError, first_line
from napkin.torch_compile import compiled_folder, stoppable_compiler
from napkin.train_step.step import TrainState
from napkin.training.preparation import Prepared
from napkin.training.signals import Interrupted, Interruption
from napkin.units import format_seconds

SILENT_SECONDS = 2.0
"""A compilation that takes longer is announced."""


def compile_first(
    train_state: TrainState,
    preparation: Prepared,
    watch: Stopwatch,
    interruption: Interruption,
    on_message: Callable[[str], None],
) -> None:
    """Compile the train state's blocks if they are to be, timed as "compiling".

    The random state is unchanged. A signal stops the compiler. Raises NapkinError
    where the compiler fails.
    """
    if not train_state.compiled:
        return
    from torch._dynamo.exc import TorchDynamoException

    plan = preparation.plan
    about = "" if plan is None else f", about {format_seconds(plan.compile_estimate.seconds)}"
    line = f"compiling the model's blocks{about}; the result is cached for runs of the same shape"
    announcement = threading.Timer(SILENT_SECONDS, on_message, [line])
    announcement.daemon = True
    announcement.start()
    devices = [0] if preparation.precision.device_type == "cuda" else []
    try:
        with (
            stoppable_compiler() as stop,
            interruption.ending(stop),
            watch("compiling"),
            torch.random.fork_rng(devices=devices),
        ):
            interruption.give_up()
            train_state.warm_up(preparation.resolved.per_device.training.batch_size)
    except (Interrupted, KeyboardInterrupt, TorchDynamoException) as error:
        if interruption.signal is not None:
            train_state.optimizer.zero_grad(set_to_none=True)
        elif isinstance(error, TorchDynamoException):
            raise NapkinError(
                f"the model's blocks cannot be compiled ({_why(error)}): remove '{compiled_folder()}' if what "
                'was kept there is damaged, or set compile = "off" under [training] in the run\'s recipe.toml; and '
                "continue with `napkin resume`"
            ) from error
        else:
            raise
    finally:
        announcement.cancel()


def _why(error: Exception) -> str:
    """The first error line of the compiler if torch quotes it, otherwise the first line of the error."""
    _, _, output = str(error).partition("Output:")
    return next((line.strip() for line in output.splitlines() if "error" in line), first_line(error))[:200]
