"""A model opened from a folder: a run of any kind, a quantized run, a Hugging Face folder; or from a GGUF file.

`load` reads what is small (config, tokenizer, chat template, settings) and refuses what cannot be used; weights are
read when something first needs them. One `LoadedModel` does everything that can be done with a model:

    model = napkin.load("runs/first")
    model.generate("def ", max_new_tokens=50)
    model.chat([{"role": "user", "content": "Hello"}])
    model.score([("2 + 2 =", " 4"), ("2 + 2 =", " 5")])
    model.evaluate("data/held-out.tokens")
    model.serve(port=8000)
    model.export("folders/first")
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from napkin.chats.chat_format import ChatFormat, Message, TemplateChat, chat_format
from napkin.chats.chat_template import ChatTemplate, bos_of_run, texts_of_run, tokens_with_bos
from napkin.checkpoint.folder import checkpoint_paths
from napkin.checkpoint.restore import load_tuned_model
from napkin.checkpoint.state import Checkpoint
from napkin.data.token_file import SEPARATOR, TokenFile
from napkin.errors import NapkinError
from napkin.evaluation.bits_per_byte import evaluate, sampled_bits_per_byte
from napkin.files import StrPath
from napkin.hardware.host import detect_host, use_all_cores
from napkin.inference.engine import Engine
from napkin.inference.foreign_texts import read_foreign_texts
from napkin.inference.generation import TextStream, continue_prompt, stream_text
from napkin.inference.opened_weights import (
    FolderWeights,
    GgufWeights,
    QuantizedWeights,
    RunWeights,
    WeightFormat,
    no_checkpoint,
)
from napkin.inference.paged_cache import KVFormat, bytes_for
from napkin.inference.quantized_run import open_quantized
from napkin.inference.requests import Request
from napkin.inference.sampling import Draw
from napkin.inference.scoring import BRANCH_TOKENS, Score, score
from napkin.inference.settings import Sampling, Speculation
from napkin.inference.speculation import DraftModel, PromptLookup, Proposer, SpeculationMeter, speculate
from napkin.model.config import ModelConfig
from napkin.model.gguf.convert import GgufFormat, load_gguf, save_gguf
from napkin.model.gguf.gguf_file import is_gguf
from napkin.model.huggingface import save_adapters, save_huggingface
from napkin.model.huggingface.convert import refuse_other_function
from napkin.model.huggingface.folder_files import TextForm, is_huggingface
from napkin.model.kv_cache import power_of_two
from napkin.model.transformer import Transformer
from napkin.optim.tensor_parts import Parts, whole_parts
from napkin.recipe.precision import Precision, choose_device, choose_precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.tuning_recipe import TuningRecipe
from napkin.runs.accounting_files import Evaluation
from napkin.runs.run_folder import (
    ConversationFile,
    QuantizedRun,
    RunFolder,
    is_quantized,
    is_run,
    what_is_there,
)
from napkin.tensors import on_huge_pages, tensors_digest
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.inspection import pattern_of
from napkin.tokenizer.interchange.gguf import gguf_vocabulary
from napkin.train_step.step import adapter_of

_BLOCK = 16

Ids = Sequence[int]


def load(
    folder: StrPath,
    *,
    name: str | None = None,
    weights: WeightFormat | None = None,
    on_message: Callable[[str], None] = lambda message: None,
) -> "LoadedModel":
    """Open a run, tuned or not, a quantized run, a Hugging Face folder with tokenizer.json, or a GGUF file.

    Args:
        name: what clients and results call the model; None is the folder's name.
        weights: the number format that weights are held and multiplied in: "auto" is bf16 where the device multiplies
            it natively. None is fp32, and bf16 for a Hugging Face folder on a GPU. Quantized weights stay as they are,
            and so do those of a GGUF file on a CPU, unless "fp32" or "bf16" is asked for.
        on_message: called for damaged checkpoints that are skipped when the weights are read.

    Raises NapkinError for a folder that is none of these, for a run without a checkpoint, and for a family, settings or
    a tokenizer that are not supported; CorruptFile where files are damaged.
    """
    path = Path(folder)
    name = path.resolve().name if name is None else name
    if is_quantized(path):
        return _open_run(RunFolder(path), name, quantized=open_quantized(path))
    if is_run(path):
        run = RunFolder.open(path)
        if not checkpoint_paths(run.checkpoints):
            raise no_checkpoint(path)
        return _open_run(run, name, weights=weights, on_message=on_message)
    if is_huggingface(path) or is_gguf(path):
        return LoadedModel(path, name, *read_foreign_texts(path), weights=weights)
    problem = what_is_there(path, "it holds neither run.json nor config.json", "name a folder that holds one of them")
    raise NapkinError(f"'{path}' is neither a run nor a Hugging Face folder, {problem}")


@dataclass(eq=False, repr=False)
class LoadedModel:
    """A model with what turns texts into its tokens and back; made by `load`, or by `LoadedModel.of`."""

    folder: Path
    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    start_ids: tuple[int, ...]
    """Tokens before every text; a chat template writes its own."""
    stop_ids: tuple[int, ...]
    """Tokens before which a text ends."""
    chat_template: ChatTemplate | None = None
    sampling: Sampling = field(default_factory=Sampling)
    """Settings where none are given: those of generation_config.json for a Hugging Face folder."""
    bos_id: int | None = None
    """The token that the model's files call bos, which they may or may not put before texts."""
    run_folder: RunFolder | None = None
    quantized: QuantizedRun | None = None
    weights: WeightFormat | None = None
    on_message: Callable[[str], None] = lambda message: None
    _engine: Engine | None = field(default=None, init=False)

    @classmethod
    def of(
        cls,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        name: str = "model",
        chat_template: ChatTemplate | None = None,
    ) -> "LoadedModel":
        """A model in memory, trained on documents between separators."""
        ends = (tokenizer.special_tokens[SEPARATOR],)
        return cls(Path(name), name, model.config, tokenizer, ends, ends, chat_template).with_model(model)

    def with_model(self, model: Transformer) -> "LoadedModel":
        """A copy with another model of the same vocabulary, such as a quantized or a pruned one."""
        other = replace(self, config=model.config)
        other.model = model
        return other

    @cached_property
    def model(self) -> Transformer:
        """The model with its weights, on the GPU if there is one, in evaluation mode; read at first use.

        Of a run these are the weights of its newest intact checkpoint, averaged ones if it has any, adapters merged.
        Raises CorruptFile where all checkpoints are damaged.
        """
        use_all_cores()
        return on_huge_pages(self._source.read(choose_device("auto"), self.weights))

    @cached_property
    def _source(self) -> FolderWeights:
        """Where the weights are."""
        if self.quantized is not None:
            return QuantizedWeights(self.folder, self.quantized)
        if self.run_folder is not None:
            return RunWeights(self.folder, self.run_folder, self.on_message)
        return GgufWeights(self.folder) if self.folder.is_file() else FolderWeights(self.folder)

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest intact checkpoint of a run, whose checksums were verified; None of other folders."""
        return self._source.checkpoint

    @property
    def run(self) -> RunFolder:
        """The folder of a run. Raises NapkinError for a Hugging Face folder."""
        if self.run_folder is None:
            raise NapkinError(f"'{self.folder}' is not a run: name a folder that `napkin train` or `napkin tune` made")
        return self.run_folder

    @property
    def recipe(self) -> Recipe:
        """The recipe of a run. Raises NapkinError for a Hugging Face folder."""
        return self.run.recipe

    @property
    def step(self) -> int:
        """Number of updates of the model; 0 of a Hugging Face folder."""
        return self._source.step

    @property
    def precision(self) -> Precision:
        """The number format of products in evaluations."""
        return choose_precision("auto", choose_device("auto"), detect_host())

    @cached_property
    def chat_format(self) -> ChatFormat:
        """The format by which conversations become its tokens: its chat template, or plain lines."""
        return chat_format(self.tokenizer, self.chat_template, self.start_ids)

    @property
    def has_chat_template(self) -> bool:
        """True if conversations have the form that the model was trained on."""
        return self.chat_template is not None

    # Texts

    def generate(
        self, prompt: str = "", *, max_new_tokens: int = 120, sampling: Sampling | None = None, **how: Any
    ) -> str:
        """Continue a text, to where the model ends it; an empty one starts a new document.

        `how` are fields of `Sampling`: temperature, top_k, top_p, stop, seed and more; what neither says is as
        `self.sampling` has it. Raises NapkinError for values out of range.
        """
        return "".join(self.stream(prompt, max_new_tokens=max_new_tokens, sampling=sampling, **how))

    def stream(
        self,
        prompt: str = "",
        *,
        max_new_tokens: int = 120,
        sampling: Sampling | None = None,
        on_draw: Callable[[Draw], object] = lambda drawn: None,
        proposer: Proposer | None = None,
        proposed: int | None = None,
        meter: SpeculationMeter | None = None,
        kv: KVFormat = "auto",
        **how: Any,
    ) -> Iterator[str]:
        """Yield the text of `generate` as it is made, in pieces of whole characters.

        The last characters are delayed if they may be the beginning of a stop text. `on_draw` is called with each
        token, and its log-probability where `logprobs` asks for it. With a `proposer`, `proposed` tokens are tested in
        each pass, see `speculate`, and `meter` measures the gain. `kv` is the number format of keys and values: with
        "int8" all tokens must fit the context.
        """
        sampling = self._with_ends(replace(sampling or self.sampling, **how))
        ids, model = self.encode_prompt(prompt) or self.document_ids, self.model
        if kv != "auto":
            if proposer is not None:
                raise NapkinError(f"keys and values in {kv} do not go with a draft model or a lookup: use one of them")
            longest = min(len(ids) + max_new_tokens, self.context_length)
            cache_bytes = bytes_for(self.config, model.dtype, 1, longest, _BLOCK, kv)
            engine = Engine(model, cache_bytes=cache_bytes, max_running=1, block_size=_BLOCK, kv=kv)
            draws = engine.stream(Request(ids, max_new_tokens, sampling))
        elif proposer is not None:
            draws = speculate(model, ids, max_new_tokens, sampling, proposer, proposed=proposed, meter=meter)
        else:
            draws = continue_prompt(model, ids, max_new_tokens, sampling)
        return stream_text(draws, self.tokenizer, sampling.stop, at_start=not prompt, on_draw=on_draw)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, max_new_tokens: int = 1024, **how: Any) -> str:
        """The model's answer to a conversation, whose text the chat template makes; `how` as in `generate`.

        Raises NapkinError where the model has no chat template, or it refuses the messages.
        """
        prompt = self._template("use generate").encode_fields(messages)
        sampling = self._with_ends(replace(self.sampling, **how))
        draws = continue_prompt(self.model, prompt, max_new_tokens, sampling)
        return "".join(stream_text(draws, self.tokenizer, sampling.stop, at_start=True))

    def proposer(self, speculation: Speculation) -> Proposer | None:
        """Return the proposer of this model's tokens, for one text after another; None where nothing is to propose."""
        draft = self.draft_model(speculation)
        return DraftModel(draft) if draft else PromptLookup(speculation.lookup) if speculation.lookup else None

    def draft_model(self, speculation: Speculation) -> Transformer | None:
        """Return the smaller model that proposes tokens for this one; None where none is named.

        Raises NapkinError where it cannot be opened, or has another tokenizer.
        """
        if speculation.draft is None:
            return None
        draft = load(speculation.draft, weights=self.weights, on_message=self.on_message)
        draft.refuse_other_tokenizer(self.tokenizer, f"'{self.folder}', for which it is to propose tokens")
        return draft.model

    def encode(self, text: str) -> list[int]:
        """The ids of a text; special tokens in it are ordinary text."""
        return self.tokenizer.encode(text)

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a text after the tokens that precede every text."""
        return [*self.start_ids, *self.tokenizer.encode(text)]

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """The ids of a conversation of (role, content). Raises NapkinError where the model has no chat template."""
        return self._template("leave out --chat").encode([Message(role, content) for role, content in messages])

    def _template(self, way_out: str) -> TemplateChat:
        if not isinstance(self.chat_format, TemplateChat):
            raise NapkinError(f"'{self.folder}' has no chat template: {way_out}")
        return self.chat_format

    def _with_ends(self, sampling: Sampling) -> Sampling:
        return replace(sampling, stop_ids=(*sampling.stop_ids, *self.stop_ids))

    # Scores and evaluations

    def score(self, pairs: Sequence[tuple[str | Ids, str | Ids]]) -> list[Score]:
        """The log-probabilities of continuations, as (prompt, continuation); shared beginnings are computed once.

        Each is a text or token ids. The text of a prompt gets the tokens that precede every text; the text of a
        continuation is encoded alone, so it has to begin with its space.
        """
        most = BRANCH_TOKENS
        if self.model.device.type == "cpu":
            # Scores of all with all cost as much as the products of so many tokens.
            most = max(128, min(most, 2 * self.config.d_model))
        ids = [
            (
                self.encode_prompt(prompt) or self.document_ids if isinstance(prompt, str) else prompt,
                self.encode(continuation) if isinstance(continuation, str) else continuation,
            )
            for prompt, continuation in pairs
        ]
        return score(self.model, ids, branch_tokens=most)

    def evaluate(
        self, tokens: StrPath | None = None, *, progress: Callable[[int, int], None] | None = None
    ) -> Evaluation:
        """Loss, perplexity and bits per byte on a token file; None is the run's validation file.

        `progress(done, total)` counts tokens. Raises NapkinError where there is none, or where another tokenizer made
        it. For questions, `napkin.evaluation.tasks.run_task` takes this model.
        """
        how = self._evaluated_on(tokens)
        return evaluate(**how, step=self.step, progress=progress)

    def sampled_bits_per_byte(self, max_tokens: int, tokens: StrPath | None = None) -> tuple[float, int]:
        """Bits per byte on the first tokens of a file, up to so many, and how many they are; None as in `evaluate`."""
        return sampled_bits_per_byte(**self._evaluated_on(tokens), max_tokens=max_tokens)

    def _evaluated_on(self, tokens: StrPath | None) -> dict[str, Any]:
        path = self.run.validation_tokens if tokens is None else tokens
        if path is None:
            raise NapkinError(f"'{self.folder}' has no validation tokens: name a token file")
        # Read into memory, as the whole text will be anyway: then a change of the file cannot crash the process.
        token_file = TokenFile.open(path, tokenizer_fingerprint=self.tokenizer.fingerprint, verify=True, in_memory=True)
        token_file.refuse_other_vocabulary(self.tokenizer)
        return {
            "model": self.model,
            "token_file": token_file,
            "tokenizer": self.tokenizer,
            "precision": self.precision,
            "separate_documents": self.run_folder is not None and self.recipe.data.separate_documents,
        }

    # What `napkin.evaluation.tasks.TaskModel` asks for besides `encode` and `encode_chat`

    @property
    def context_length(self) -> int:
        """Tokens that the model sees at a time."""
        return self.config.context_length

    @property
    def document_ids(self) -> tuple[int, ...]:
        """The ids that a text without a prompt follows, as in lm-evaluation-harness; empty if there are none."""
        return self.start_ids or (self.stop_ids[:1] if self.bos_id is None else (self.bos_id,))

    def logprobs(self, pairs: Sequence[tuple[Ids, Ids]]) -> list[float]:
        """The log-probability of each continuation, in nats."""
        return [each.total for each in self.score(pairs)]

    def complete(
        self,
        prompts: Sequence[Ids],
        max_new_tokens: int,
        stop: Sequence[str],
        sampling: Sampling | None = None,
    ) -> Iterator[tuple[int, str]]:
        """The likeliest tokens after each prompt, up to a stop text, with its number, as they end.

        With a `sampling` they are drawn, those of each prompt with the seed after that of the one before.
        """
        sampling = sampling or Sampling(temperature=0.0)
        engine = self._engine_for(max(map(len, prompts), default=0) + max_new_tokens)
        running = {
            number: (
                engine.submit(Request(tuple(prompt), max_new_tokens, replace(sampling, seed=sampling.seed + number))),
                TextStream(self.tokenizer, stop),
            )
            for number, prompt in enumerate(prompts)
        }
        texts, read = [""] * len(prompts), [0] * len(prompts)
        while running:
            engine.step()
            for number, (completion, stream) in list(running.items()):
                for drawn in completion.draws[read[number] :]:
                    read[number] += 1
                    texts[number] += stream.push(drawn.token) if not stream.stopped else ""
                if completion.finish is not None or stream.stopped:
                    texts[number] += stream.finish()
                    if completion.finish is None:
                        engine.cancel(completion)
                    del running[number]
                    yield number, texts[number]

    def about(self) -> dict[str, Any]:
        """Name, checksum of the weights, number format, tokenizer: they identify this model in results."""
        return {
            "name": self.name,
            "weights_sha256": self._weights_sha256,
            "tokenizer": self.tokenizer.fingerprint,
            "weights": str(self.model.dtype).removeprefix("torch."),
            "device": self.model.device.type,
            "parameters": self.n_parameters,
        }

    @property
    def n_parameters(self) -> int:
        """Parameters of the model, without reading the weights."""
        return sum(parameter.numel() for parameter in Transformer(self.config, device="meta").parameters())

    def _engine_for(self, longest: int) -> Engine:
        """An engine for sequences of this length, reused or new: a cache for the whole context may take gigabytes."""
        if self._engine is None or self._engine.longest < min(longest, self.context_length):
            # Lengths are rounded up to powers of two, so that a slightly longer batch needs no new engine.
            self._engine = Engine(self.model, stop_ids=self.stop_ids, longest=power_of_two(longest, least=256))
        return self._engine

    @cached_property
    def _weights_sha256(self) -> str:
        state = sorted(self.model.state_dict().items())
        return tensors_digest((name, tensor) for name, tensor in state if isinstance(tensor, torch.Tensor))

    # Uses of the whole model

    def engine(self, speculation: Speculation | None = None, **settings: Any) -> Engine:
        """Return an engine that serves the model; `settings` are those of `napkin.inference.Engine`."""
        proposing = speculation or Speculation()
        draft, lookup, proposed = self.draft_model(proposing), proposing.lookup, proposing.proposed
        return Engine(self.model, draft=draft, lookup=lookup, proposed=proposed, **settings)

    def serve(self, *, speculation: Speculation | None = None, **how: Any) -> None:
        """Serve the model over HTTP until SIGTERM or SIGINT; `how` are the engine's max_running, cache_bytes, kv and
        batch_invariant, and what `napkin.serving.serve` takes: host, port, key, limits, on_start."""
        # The server stands on a floor above: it is reached through the front door, as a user does.
        import napkin

        names = ("max_running", "cache_bytes", "kv", "batch_invariant")
        engine = self.engine(speculation, **{name: how.pop(name) for name in names if name in how})
        napkin.serving.serve(self, engine, **how)

    def export(
        self, folder: StrPath, *, weights_only: bool = False, adapter: bool = False, to: GgufFormat = "F16"
    ) -> None:
        """Write model and tokenizer as a Hugging Face folder, which `transformers` reads; under a name that ends with
        .gguf as a GGUF file, which llama.cpp and Ollama read, with matrices in the number format `to`.

        `weights_only` leaves the tokenizer out; `adapter` writes only the adapters of a run of tuning, as peft reads
        them. Raises NapkinError for what cannot be represented exactly, and where the run has no adapters.
        """
        if self.quantized is not None:
            raise NapkinError(f"'{self.folder}' is quantized: export '{self.quantized.source}', which it was made of")
        if adapter:
            recipe = self.recipe
            if not isinstance(recipe, TuningRecipe) or adapter_of(recipe) is None:
                raise NapkinError(f"'{self.folder}' has trained no adapters: leave out --adapter")
            start = recipe.tuning.start
            tuned = RunWeights(self.folder, self.run, self.on_message).newest(load_tuned_model)
            save_adapters(tuned, Path(folder), base=start if is_huggingface(start) else None)
        elif Path(folder).suffix == ".gguf":
            form = self._text_form()
            named = form.chat_template, form.template_tokens.get("bos_token")
            keys = None if weights_only else gguf_vocabulary(self.tokenizer, form.first, form.stops, *named)
            save_gguf(self._whole, folder, to=to, vocabulary=keys, name=self.name)
        elif weights_only:
            save_huggingface(self._whole, folder)
        else:
            try:
                pattern_of(self.tokenizer)
            except NapkinError as error:
                raise NapkinError(f"{error}; --weights-only leaves the tokenizer out") from None
            save_huggingface(self._whole, folder, tokenizer=self.tokenizer, form=self._text_form())

    @property
    def _whole(self) -> Transformer:
        """The model, with numbers where a GGUF file has integers."""
        source = self._source
        keeps_integers = isinstance(source, GgufWeights) and source.keeps_integers(self.weights)
        return load_gguf(self.folder) if keeps_integers else self.model

    def _text_form(self) -> TextForm:
        """Return the tokens around texts, and the chat template, by the names of tokens."""
        named = {number: text for text, number in self.tokenizer.special_tokens.items()}
        template = self.chat_template
        return TextForm(
            [named[each] for each in self.start_ids if each in named],
            [named[each] for each in self.stop_ids if each in named],
            None if template is None else template.source,
            tokens_with_bos(template, self.tokenizer, self.bos_id),
        )

    # A model that tuning starts from

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of the checksums of the files that hold the weights; reads them once.

        Raises CorruptFile where they are damaged.
        """
        return self._source.fingerprint

    def load_into(self, model: Transformer) -> None:
        """Copy the weights into a model of the same config, in its dtype and on its device.

        Raises NapkinError where the config differs in what it computes, CorruptFile where the weights are damaged; the
        model is unchanged then.
        """
        self.load_parts(model.config, whole_parts(model))

    def load_parts(self, config: ModelConfig, parts: Parts) -> None:
        """`load_into` for some parts of a model of that config: each rank reads its own."""
        refuse_other_function(config, self.config, str(self.folder))
        self._source.load_parts(config, parts)

    def conversation_file(self, chat_template: ChatTemplate | None = None) -> ConversationFile:
        """The conversation.json of a run that starts from this model; None is its own template, if it has one."""
        template = chat_template or self.chat_template
        known = None if template is None else template.source, tokens_with_bos(template, self.tokenizer, self.bos_id)
        return ConversationFile("napkin-conversation", 1, self.start_ids, self.stop_ids, *known)

    def refuse_other_tokenizer(self, tokenizer: Tokenizer, whose: str) -> None:
        """Raise NapkinError if another tokenizer's ids would mean other texts here: models that are compared, or
        trained from each other, must have the same vocabulary."""
        if tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise NapkinError(
                f"'{self.folder}' has another tokenizer ({self.tokenizer.vocab_size:,} tokens) than {whose} "
                f"({tokenizer.vocab_size:,}): use a model with the same one"
            )

    def __repr__(self) -> str:
        return f"LoadedModel('{self.folder}', {self.n_parameters:,} parameters)"


def _open_run(run: RunFolder, name: str, **how: Any) -> LoadedModel:
    tokenizer = run.tokenizer
    how |= {"bos_id": bos_of_run(run.path, tokenizer), "run_folder": run}
    return LoadedModel(run.path, name, run.recipe.model, tokenizer, *texts_of_run(run.path, tokenizer), **how)
