"""`napkin export`."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from napkin.cli.common.files import folder_for, refuse_existing
from napkin.cli.common.options import RunOptions, Switch, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, print_json, say
from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.inspection import pattern_of
from napkin.units import format_bytes

if TYPE_CHECKING:
    from napkin.inference.trained import Trained
    from napkin.model.huggingface.folder_files import TextForm


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
    if options.adapter:
        _export_adapter(options, out)
        return
    with progress_line("opening the run") as line:
        from napkin.inference.trained import load_run
        from napkin.model.huggingface import save_huggingface

        trained = load_run(options.run, on_message=notify)
        if trained.quantized is not None:
            raise NapkinError(
                f"'{options.run}' is quantized: export '{trained.quantized.source}', which it was made of"
            )
        line.retitle("writing")
        tokenizer = None if options.weights_only else _exportable(trained.tokenizer)
        form = None if tokenizer is None else _form(trained)
        with folder_for(out):
            save_huggingface(trained.model, out, tokenizer=tokenizer, form=form)
    _show(options, out, trained.step)


def _export_adapter(options: ExportOptions, out: Path) -> None:
    with progress_line("opening the run") as line:
        from napkin.checkpoint.restore import load_tuned_model
        from napkin.inference.pretrained import is_pretrained
        from napkin.inference.trained import load_newest_model
        from napkin.model.huggingface import save_adapters
        from napkin.recipe.tuning_recipe import TuningRecipe
        from napkin.runs.run_folder import RunFolder
        from napkin.train_step.tuned_model import adapter_of

        recipe = RunFolder.open(options.run).recipe
        if not isinstance(recipe, TuningRecipe) or adapter_of(recipe) is None:
            raise NapkinError(f"'{options.run}' has trained no adapters: leave out --adapter")
        checkpoint, model = load_newest_model(RunFolder(Path(options.run)), load_tuned_model, on_message=notify)
        line.retitle("writing")
        start = recipe.tuning.start
        with folder_for(out):
            save_adapters(model, out, base=start if is_pretrained(start) else None)
    if not Path(start).is_dir():
        notify(f"'{start}' is not there: they are for a folder that `napkin export` has written of the same weights")
    elif not is_pretrained(start):
        notify(f"they are for the folder that `napkin export {shlex.quote(start)}` writes")
    _show(options, out, checkpoint.state.step)


def _show(options: ExportOptions, out: Path, step: int) -> None:
    files = {path.name: path.stat().st_size for path in sorted(out.iterdir())}
    if options.json:
        print_json({"folder": out, "step": step, "files": files})
        return
    say(f"wrote {out}: step {step:,}, {format_bytes(sum(files.values()))} in {', '.join(files)}")


def _form(trained: "Trained") -> "TextForm":
    """What stands around the run's texts, and its chat template."""
    from napkin.chats.run_texts import run_texts
    from napkin.model.huggingface.folder_files import TextForm

    texts, special = run_texts(trained.run.path, trained.tokenizer), trained.tokenizer.special_tokens
    named = {number: text for text, number in special.items()}
    template = texts.chat_template
    return TextForm(
        [named[each] for each in texts.first_ids if each in named],
        [named[each] for each in texts.stop_ids if each in named],
        None if template is None else template.source,
        {} if template is None else template.special_tokens,
    )


def _exportable(tokenizer: Tokenizer) -> Tokenizer:
    try:
        pattern_of(tokenizer)
    except NapkinError as error:
        raise NapkinError(f"{error}; --weights-only leaves the tokenizer out") from None
    return tokenizer
