"""A model opened for conversations and completions: a run of napkin, or a Hugging Face folder."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from napkin.chats.chat_format import ChatFormat, TemplateChat, chat_format
from napkin.chats.run_texts import run_texts
from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.hardware.host import detect_host
from napkin.inference.pretrained import is_pretrained, load_pretrained
from napkin.inference.trained import load_run
from napkin.model.transformer import Transformer
from napkin.recipe.precision import choose_precision
from napkin.runs.model_files import is_quantized
from napkin.runs.run_folder import is_run
from napkin.tokenizer.base import Tokenizer

WeightFormat = Literal["auto", "fp32", "bf16"]


@dataclass(frozen=True)
class OpenModel:
    """A model with what turns texts into its tokens and back."""

    name: str
    model: Transformer
    tokenizer: Tokenizer
    start_ids: tuple[int, ...]
    """What stands before every text."""
    stop_ids: tuple[int, ...]
    """Before which a completion ends."""
    chat: ChatFormat

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations have the form that the model was trained on."""
        return isinstance(self.chat, TemplateChat)

    def encode(self, text: str) -> list[int]:
        """The ids of a text with what stands before it; special tokens in it are ordinary text."""
        return [*self.start_ids, *self.tokenizer.encode(text)]


def open_model(
    folder: StrPath,
    *,
    name: str | None = None,
    weights: WeightFormat = "fp32",
    on_message: Callable[[str], None] = lambda message: None,
) -> OpenModel:
    """Open the newest checkpoint of a run, or a Hugging Face folder with tokenizer.json, on the GPU if there is one.

    `name` is the folder's if it is None. `weights` is the number format that they are held and multiplied in: "auto" is
    bf16 where the device multiplies it natively; quantized weights stay as they are. Raises NapkinError for a folder
    that is neither.
    """
    path = Path(folder)
    if not path.is_dir():
        raise NapkinError(f"there is no folder '{path}': name a run or a Hugging Face folder")
    if is_run(path) or is_quantized(path):
        opened = _of_run(path, name, on_message)
    elif is_pretrained(path):
        opened = _of_huggingface(path, name)
    else:
        opened = None
    if opened is not None:
        if not is_quantized(path):
            _hold_weights_in(opened.model, weights)
        return opened
    raise NapkinError(f"'{path}' is neither a run nor a Hugging Face folder (config.json): name one of them")


def _hold_weights_in(model: Transformer, weights: WeightFormat) -> None:
    """Tables of positions stay in fp32."""
    device_type = model.head_weight.device.type
    assert device_type in ("cpu", "cuda")
    products = choose_precision(weights, device_type, detect_host()).products
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16 if products == "bf16" else torch.float32)


def _of_run(path: Path, name: str | None, on_message: Callable[[str], None]) -> OpenModel:
    trained = load_run(path, on_message=on_message)
    texts = run_texts(path, trained.tokenizer)
    chat = chat_format(trained.tokenizer, texts.chat_template, texts.first_ids)
    model = trained.model
    return OpenModel(_name(path, name), model, trained.tokenizer, texts.first_ids, texts.stop_ids, chat)


def _of_huggingface(path: Path, name: str | None) -> OpenModel:
    found = load_pretrained(path, dtype=torch.float32)
    chat = chat_format(found.tokenizer, found.chat_template, found.first_ids)
    stop_ids = tuple(found.sampling.stop_ids)
    return OpenModel(_name(path, name), found.model, found.tokenizer, found.first_ids, stop_ids, chat)


def _name(path: Path, name: str | None) -> str:
    return path.resolve().name if name is None else name
