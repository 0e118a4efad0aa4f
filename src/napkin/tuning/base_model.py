"""The model that tuning starts from, and a frozen copy of it to compare with."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from napkin.checkpoint.state import load_frozen
from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.inference.loaded_model import LoadedModel, load
from napkin.model.transformer import Transformer
from napkin.recipe.precision import Precision
from napkin.recipe.tuning_recipe import TuningRecipe
from napkin.runs.model_files import is_quantized
from napkin.runs.run_folder import RunFolder, is_run
from napkin.train_step.tuned_model import adapter_of


def open_base(folder: StrPath) -> LoadedModel:
    """Open a run, or a Hugging Face folder, whose weights can be trained, without reading them.

    Raises NapkinError as `napkin.load` does, and for a quantized run.
    """
    if not str(folder):
        raise NapkinError("no model to start from is named: give a run or a Hugging Face folder")
    if is_quantized(Path(folder)):
        raise NapkinError(f"'{folder}' is quantized, and integers are not trained: start from the run it was made of")
    return load(folder)


def reference_model(base: LoadedModel, precision: Precision) -> Transformer:
    """The base model, frozen, on the precision's device, to compare a tuned model with."""
    model = Transformer(base.config)
    base.load_into(model)
    model.requires_grad_(False).eval()
    return model.to(precision.device_type)


def initial_weights(run: Path, recipe: TuningRecipe) -> Callable[[Transformer], None]:
    """Return a function that copies a run's initial weights into a model: frozen ones from the run's folder, once that
    exists, others from the base model. Raises NapkinError where there is none."""
    if adapter_of(recipe) is not None and is_run(run):
        return partial(load_frozen, RunFolder(run).checkpoints)
    return open_base(recipe.tuning.start).load_into
