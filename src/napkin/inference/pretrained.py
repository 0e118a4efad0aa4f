"""A Hugging Face folder, opened for use: model, tokenizer, chat template and how its makers draw tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from napkin.chats.chat_format import TemplateChat
from napkin.chats.chat_template import ChatTemplate, Message, read_chat_template, read_first_ids
from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.hardware.host import detect_host
from napkin.inference.engine_generation import continue_tokens
from napkin.inference.generation import continue_prompt
from napkin.inference.paged_cache import KVFormat
from napkin.inference.sampling import Draw
from napkin.inference.settings import Sampling, Speculation, read_generation_config
from napkin.inference.speculation import DraftModel, PromptLookup, Proposer
from napkin.inference.speculation_plan import SpeculationMeter
from napkin.inference.text_stream import stream_text
from napkin.model.huggingface.convert import load_huggingface
from napkin.model.transformer import Transformer
from napkin.recipe.precision import choose_device
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.interchange.huggingface import read_huggingface


@dataclass(frozen=True)
class Pretrained:
    """A model from elsewhere; in fp32, or on a GPU in bf16."""

    folder: Path
    tokenizer: Tokenizer
    model: Transformer
    sampling: Sampling
    """What generation_config.json says."""
    chat_template: ChatTemplate | None
    first_ids: tuple[int, ...]
    """Tokens before every text, such as one for its beginning."""

    def generate(self, prompt: str = "", *, max_tokens: int = 120, sampling: Sampling | None = None, **how: Any) -> str:
        """Continue a text, to where the model ends it.

        `how` are fields of `Sampling`; what neither says is as generation_config.json has it. Raises NapkinError for
        values out of range.
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
        """Yield the text of `generate` as it is made, in pieces of whole characters; see `Trained.stream`."""
        start = [*self.first_ids, *self.tokenizer.encode(prompt)]
        sampling = self._with_ends(replace(sampling or self.sampling, **how))
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
        """What proposes tokens of this model's, see `Trained.proposer`; a draft model is a Hugging Face folder too."""
        if speculation.draft is None:
            return PromptLookup(speculation.lookup) if speculation.lookup else None
        draft = load_pretrained(speculation.draft)
        if draft.tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise NapkinError(
                f"'{draft.folder}' has another tokenizer than '{self.folder}': a draft model needs the same one"
            )
        return DraftModel(draft.model)

    def chat(self, messages: Sequence[Message], *, max_tokens: int = 1024, **how: Any) -> str:
        """The model's answer to a conversation, whose text the chat template makes.

        Raises NapkinError where the folder has no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise NapkinError(f"'{self.folder}' has no chat template: use generate")
        start = TemplateChat(self.tokenizer, self.chat_template).encode_fields(messages)
        sampling = self._with_ends(replace(self.sampling, **how))
        draws = continue_prompt(self.model, start, max_tokens, sampling)
        return "".join(stream_text(draws, self.tokenizer, sampling.stop, at_start=True))

    def _with_ends(self, sampling: Sampling) -> Sampling:
        return replace(sampling, stop_ids=(*sampling.stop_ids, *self.sampling.stop_ids))

    def __repr__(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return f"Pretrained('{self.folder}', {parameters:,} parameters)"


def is_pretrained(folder: StrPath) -> bool:
    """Whether a folder looks like a Hugging Face model."""
    return (Path(folder) / "config.json").exists()


def load_pretrained(folder: StrPath, *, dtype: torch.dtype | None = None) -> Pretrained:
    """Load a Hugging Face folder, on the GPU if there is one; `dtype` None is fp32, or on a GPU bf16.

    Raises NapkinError for a family, settings or a tokenizer that are not supported.
    """
    folder = Path(folder)
    torch.set_num_threads(detect_host().cores)
    device_type = choose_device("auto")
    if not (folder / "tokenizer.json").is_file():
        raise NapkinError(f"'{folder}' has no tokenizer.json: texts cannot be turned into tokens without it")
    # Of the folder's files the small ones first: a tokenizer that is not supported is told at once.
    tokenizer = read_huggingface(folder / "tokenizer.json", drop_template=True)
    first_ids = read_first_ids(folder, tokenizer)
    sampling, chat_template = read_generation_config(folder), read_chat_template(folder)
    model = load_huggingface(folder, dtype=dtype or (torch.float32 if device_type == "cpu" else torch.bfloat16))
    if tokenizer.vocab_size > model.config.vocab_size:
        raise NapkinError(
            f"'{folder}' has a tokenizer of {tokenizer.vocab_size} ids and a model of {model.config.vocab_size}: "
            "download it again"
        )
    return Pretrained(folder, tokenizer, model.to(device_type), sampling, chat_template, first_ids)
