"""A trained run, opened for use: the model of its newest intact checkpoint, and its tokenizer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from napkin.chats.run_texts import run_texts
from napkin.checkpoint.restore import load_newest, load_plain_model
from napkin.checkpoint.state import Checkpoint
from napkin.data.token_file import TokenFile
from napkin.errors import NapkinError
from napkin.evaluation.bits_per_byte import evaluate, sampled_bits_per_byte
from napkin.files import StrPath
from napkin.hardware.host import detect_host
from napkin.inference.engine_generation import continue_tokens
from napkin.inference.paged_cache import KVFormat
from napkin.inference.pretrained import Pretrained, is_pretrained, load_pretrained
from napkin.inference.quantized_run import read_quantized
from napkin.inference.sampling import Draw
from napkin.inference.settings import Sampling, Speculation
from napkin.inference.speculation import DraftModel, PromptLookup, Proposer
from napkin.inference.speculation_plan import SpeculationMeter
from napkin.inference.text_stream import stream_text
from napkin.model.transformer import Transformer
from napkin.recipe.precision import Precision, choose_device, choose_precision
from napkin.recipe.recipe import Recipe
from napkin.runs.accounting_files import Evaluation
from napkin.runs.model_files import QuantizedRun, is_quantized
from napkin.runs.run_folder import RunFolder, is_run
from napkin.tokenizer.base import Tokenizer


@dataclass(frozen=True)
class Trained:
    """The model of a run's newest intact checkpoint, on the GPU if there is one."""

    run: RunFolder
    recipe: Recipe
    tokenizer: Tokenizer
    model: Transformer
    precision: Precision
    checkpoint: Checkpoint | None
    """None of a quantized run."""
    quantized: QuantizedRun | None = None

    @property
    def step(self) -> int:
        """Number of updates of the model."""
        if self.checkpoint is not None:
            return self.checkpoint.state.step
        return 0 if self.quantized is None else self.quantized.step

    def with_model(self, model: Transformer) -> "Trained":
        """The same with another model."""
        return replace(self, model=model)

    def generate(self, prompt: str = "", *, max_tokens: int = 120, sampling: Sampling | None = None, **how: Any) -> str:
        """Continue a text; an empty one starts a new document. The continuation ends where the model ends the document.

        `how` are fields of `Sampling`: temperature, top_k, top_p, stop, seed and more. Raises NapkinError for values
        out of range.
        """
        return "".join(self.stream(prompt, max_tokens=max_tokens, sampling=sampling, **how))

    def stream(
        self,
        prompt: str = "",
        *,
        max_tokens: int = 120,
        sampling: Sampling | None = None,
        on_draw: Callable[[Draw], object] = lambda drawn: None,
        proposer: Proposer | None = None,
        proposed: int | None = None,
        meter: SpeculationMeter | None = None,
        kv: KVFormat = "auto",
        **how: Any,
    ) -> Iterator[str]:
        """Yield the text of `generate` as it is made, in pieces of whole characters.

        The last characters come late where they may be the beginning of a stop text. `on_draw` is called with each
        token, and its log-probability where `logprobs` asks for it. With a `proposer`, `proposed`
        tokens are tested in each pass, see `speculate`, and `meter` tells what that gained. `kv` is what keys and
        values are held in: with "int8" all tokens must fit the context.
        """
        sampling = replace(sampling or Sampling(), **how)
        texts = run_texts(self.run.path, self.tokenizer)
        sampling = replace(sampling, stop_ids=(*sampling.stop_ids, *texts.stop_ids))
        start = [*texts.first_ids, *self.tokenizer.encode(prompt)]
        draws = continue_tokens(
            self.model,
            start,
            max_tokens,
            sampling,
            proposer=proposer,
            proposed=proposed,
            meter=meter,
            kv=kv,
        )
        return stream_text(draws, self.tokenizer, sampling.stop, at_start=not prompt, on_draw=on_draw)

    def proposer(self, speculation: Speculation) -> Proposer | None:
        """What proposes tokens of this model's, for one text after another; None where nothing is to.

        Raises NapkinError where the draft model is not a run, or has another tokenizer.
        """
        if speculation.draft is None:
            return PromptLookup(speculation.lookup) if speculation.lookup else None
        draft = load_run(speculation.draft)
        if draft.tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise NapkinError(
                f"'{draft.run.path}' has another tokenizer than '{self.run.path}': a draft model needs the same one"
            )
        return DraftModel(draft.model)

    def evaluate(
        self, tokens: StrPath | None = None, *, progress: Callable[[int, int], None] | None = None
    ) -> Evaluation:
        """Loss, perplexity and bits per byte on a token file; None is the run's validation file.

        `progress(done, total)` counts tokens. Raises NapkinError where there is none, or where another tokenizer made
        it.
        """
        token_file = self._opened(tokens)
        return evaluate(
            self.model,
            token_file,
            self.tokenizer,
            self.precision,
            step=self.step,
            separate_documents=self.recipe.data.separate_documents,
            progress=progress,
        )

    def sampled_bits_per_byte(self, max_tokens: int, tokens: StrPath | None = None) -> tuple[float, int]:
        """Bits per byte on the first tokens of a file, up to so many, and how many they are; None as in `evaluate`."""
        return sampled_bits_per_byte(
            self.model,
            self._opened(tokens),
            self.tokenizer,
            self.precision,
            max_tokens=max_tokens,
            separate_documents=self.recipe.data.separate_documents,
        )

    def _opened(self, tokens: StrPath | None) -> TokenFile:
        path = self.run.validation_tokens if tokens is None else tokens
        if path is None:
            raise NapkinError(f"'{self.run.path}' has no validation tokens: name a token file")
        # In memory, as the whole text will be: nothing that becomes of the file can end the process.
        token_file = TokenFile.open(path, tokenizer_fingerprint=self.tokenizer.fingerprint, verify=True, in_memory=True)
        token_file.refuse_other_vocabulary(self.tokenizer)
        return token_file

    def __repr__(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return f"Trained('{self.run.path}', step {self.step:,}, {parameters:,} parameters, {self.precision.name})"


def load(folder: StrPath, *, on_message: Callable[[str], None] = lambda message: None) -> Trained | Pretrained:
    """Load a run, see `load_run`, or a Hugging Face folder, see `napkin.inference.pretrained.load_pretrained`."""
    if not is_run(Path(folder)) and is_pretrained(folder):
        return load_pretrained(folder)
    return load_run(folder, on_message=on_message)


def load_run(folder: StrPath, *, on_message: Callable[[str], None] = lambda message: None) -> Trained:
    """Load the newest intact checkpoint of a run, with its averaged weights if it has any; or a quantized run.

    The model is in evaluation mode. `on_message` is called for damaged checkpoints that are skipped. Raises NapkinError
    where the folder is not a run or has no checkpoint yet, CorruptFile where all checkpoints are damaged.
    """
    if is_quantized(Path(folder)):
        return _load_quantized(Path(folder))
    run = RunFolder.open(folder)
    recipe, tokenizer, host = run.recipe, run.tokenizer, detect_host()
    torch.set_num_threads(host.cores)
    device_type = choose_device("auto")
    checkpoint, model = load_newest_model(run, load_plain_model, on_message=on_message)
    precision = choose_precision("auto", device_type, host)
    return Trained(run, recipe, tokenizer, model.eval().to(device_type), precision, checkpoint)


def load_newest_model(
    run: RunFolder,
    load: Callable[[Checkpoint, Recipe], Transformer],
    *,
    on_message: Callable[[str], None] = lambda message: None,
) -> tuple[Checkpoint, Transformer]:
    """The newest intact checkpoint of a run, and what `load` makes of it. Raises as `load_run`."""
    recipe, models = run.recipe, list[Transformer]()
    checkpoint, damaged = load_newest(run.checkpoints, lambda each: models.append(load(each, recipe)))
    if checkpoint is None:
        raise NapkinError(f"'{run.path}' has no checkpoint yet: train it with `napkin resume {run.path}`")
    if run.recipe_was_changed:
        on_message(f"'{run.path / 'recipe.toml'}' was changed after the run had been created")
    for error in damaged.values():
        on_message(f"a damaged checkpoint is skipped for '{checkpoint.path.name}': {error}")
    return checkpoint, models[-1]


def _load_quantized(folder: Path) -> Trained:
    run, host = RunFolder(folder), detect_host()
    torch.set_num_threads(host.cores)
    device_type = choose_device("auto")
    about, model = read_quantized(folder)
    precision = choose_precision("auto", device_type, host)
    return Trained(run, run.recipe, run.tokenizer, model.to(device_type), precision, None, about)
