"""`napkin export`."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from napkin.cli.common.files import folder_for, refuse_existing
from napkin.cli.common.options import RunOptions, Switch, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, print_json, say
from napkin.errors import NapkinError
from napkin.units import format_bytes


@dataclass(frozen=True)
class ExportOptions(RunOptions):
    """Write a run's newest good model and its tokenizer as a Hugging Face folder, which `transformers` reads: it gives
    the same logits, and the same text up to the model's context length. A model or a tokenizer that cannot be
    represented exactly is refused."""

    out: str = ""
    """Folder to write; required. It must not exist."""
    weights_only: Switch = False
    """Leave out the tokenizer, which has to be a byte-level BPE."""
    adapter: Switch = False
    """Write only the adapters of a run of tuning, as peft reads them, for the model that it started from; otherwise
    they are merged."""


@command("export", ExportOptions)
def main(options: ExportOptions) -> None:
    if not options.out:
        raise NapkinError("no folder to write is named: give --out FOLDER")
    out = Path(options.out)
    refuse_existing(out)
    with progress_line("opening the run") as line:
        from napkin.inference.loaded_model import is_huggingface, load
        from napkin.recipe.tuning_recipe import TuningRecipe

        model = load(options.run, on_message=notify)
        recipe = model.recipe
        line.retitle("writing")
        with folder_for(out):
            model.export(out, weights_only=options.weights_only, adapter=options.adapter)
    if options.adapter and isinstance(recipe, TuningRecipe):
        base = recipe.tuning.start
        if not Path(base).is_dir():
            notify(f"'{base}' is not there: they are for a folder that `napkin export` has written of the same weights")
        elif not is_huggingface(base):
            notify(f"they are for the folder that `napkin export {shlex.quote(base)}` writes")
    _show(options, out, model.step)


def _show(options: ExportOptions, out: Path, step: int) -> None:
    files = {path.name: path.stat().st_size for path in sorted(out.iterdir())}
    if options.json:
        print_json({"folder": out, "step": step, "files": files})
        return
    say(f"wrote {out}: step {step:,}, {format_bytes(sum(files.values()))} in {', '.join(files)}")
