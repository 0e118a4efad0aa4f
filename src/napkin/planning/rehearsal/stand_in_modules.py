"""Stand-ins for packages that a script imports and this machine lacks: kernels, trackers, tokenizers and pictures.

A kernel computes by torch's own operators what the package's would, so that its bytes and FLOPs are counted; what only
shows or logs does nothing. A package that is installed is used as it is, but for wandb, which is switched off, and
encodings of tiktoken that it would download.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, no_type_check

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._triton import has_triton_package

SILENT = (
    "wandb", "swanlab", "mlflow", "trackio", "comet_ml", "neptune", "clearml", "aim", "dvclive", "pynvml",
    "nvidia_smi", "GPUtil", "gpustat", "matplotlib", "seaborn", "plotly", "tensorboard", "tensorboardX", "termcolor",
    "colorama", "torchinfo", "torchsummary", "fvcore", "codecarbon", "sklearn", "nltk", "rouge_score",
)  # fmt: skip
"""Packages that show, log or measure: nothing that they return is needed for a step."""
IMAGES = {
    "MNIST": (1, 28, 10), "FashionMNIST": (1, 28, 10), "KMNIST": (1, 28, 10), "EMNIST": (1, 28, 47),
    "QMNIST": (1, 28, 10), "USPS": (1, 16, 10), "CIFAR10": (3, 32, 10), "CIFAR100": (3, 32, 100), "SVHN": (3, 32, 10),
    "STL10": (3, 96, 10), "Flowers102": (3, 500, 102), "Food101": (3, 512, 101), "ImageNet": (3, 500, 1000),
    "ImageFolder": (3, 500, 1000), "FakeData": (3, 224, 10), "CelebA": (3, 218, 40), "LSUN": (3, 256, 10),
}  # fmt: skip
"""Channels, sides and classes of torchvision's data sets."""
N_IMAGES = 50_000


def stand_in_modules(note: Callable[[str], None], folder: str) -> None:
    """Let a script of `folder` find stand-ins for packages that are not installed; `note` takes what they assume."""
    sys.meta_path.insert(0, _StandInFinder(note, folder + os.sep))


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins when the script or a module beside it imports them.

    Libraries do without packages that are not installed, as they do outside of a rehearsal.
    """

    def __init__(self, note: Callable[[str], None], folder: str) -> None:
        self.note, self.folder = note, folder

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        first, _, rest = fullname.partition(".")
        if fullname == "torch.utils.tensorboard":
            first = "tensorboard"
        elif rest:
            # The parts of other stand-ins are there as soon as these are.
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if first in SILENT else None
        if first not in SILENT and first not in _MAKERS:
            return None
        if first == "wandb":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
            frame = frame.f_back
        if frame is None or not frame.f_code.co_filename.startswith(self.folder):
            return None
        spec = importlib.machinery.PathFinder.find_spec(first)
        # A mere folder of that name is not the package.
        if first != "tiktoken" and spec is not None and spec.origin is not None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        if spec.name not in _MAKERS:
            return Silent(spec.name)
        _MAKERS[spec.name](self.note)
        return sys.modules[spec.name]

    def exec_module(self, module: Any) -> None:
        if type(module) is Silent:
            module.__path__ = []
            module.__dict__["__version__"] = "99.0"


class Silent(types.ModuleType):
    """A module in which every name is a do-nothing function, which returns such an object again."""

    def __getattr__(self, name: str) -> Any:
        return _silent_name(name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __getitem__(self, key: Any) -> Any:
        return self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (_SilentBase,)


def _silent_name(name: str) -> Silent:
    if name.startswith("__"):
        raise AttributeError(name)
    return Silent(name)


class _SilentBase:
    """The base of a script's class that derives from one of a silent module."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return _silent_name(name)


def _module(name: str, **names: Any) -> Any:
    module: Any = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__version__ = "99.0"
    for key, value in names.items():
        setattr(module, key, value)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
    return module


@no_type_check
def _attention_functions() -> dict[str, Any]:
    """FlashAttention's functions."""

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: Any = None,
        causal: bool = False,
        **_: Any,
    ) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout_p, is_causal=causal, scale=softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2)

    def attend_packed(qkv: Tensor, *given: Any, **named: Any) -> Tensor:
        q, k, v = qkv.unbind(2)
        return attend(q, k, v, *given, **named)

    def attend_documents(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: Any = None,
        max_seqlen_k: Any = None, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False, **_: Any,
    ) -> Tensor:  # fmt: skip
        longest = min(int(max_seqlen_q or q.shape[0]), q.shape[0])
        n = q.shape[0] // longest if longest and q.shape[0] % longest == 0 else 1
        q, k, v = (tensor.unflatten(0, (n, -1)) for tensor in (q, k, v))
        return attend(q, k, v, dropout_p, softmax_scale, causal).flatten(0, 1)

    return {
        "flash_attn_func": attend,
        "flash_attn_qkvpacked_func": attend_packed,
        "flash_attn_varlen_func": attend_documents,
    }


def _flash_attention(_: Callable[[str], None]) -> None:
    _module("flash_attn", **_attention_functions())
    _module("flash_attn.flash_attn_interface", **_attention_functions())


def _flash_attention_3(_: Callable[[str], None]) -> None:
    _module("flash_attn_interface", **_attention_functions())


@no_type_check
def _kernels(note: Callable[[str], None]) -> None:
    """The hub of kernels, of which attention is known."""

    def get_kernel(name: str, *_: Any, **__: Any) -> Any:
        note(f"kernels of '{name}' are not here: attention of documents is counted as of the longest one")
        functions = _attention_functions()
        return types.SimpleNamespace(**functions, flash_attn_interface=types.SimpleNamespace(**functions))

    # The script may have a folder of that name with kernels of its own.
    _module("kernels", get_kernel=get_kernel).__path__ = ["kernels"]


@no_type_check
def _xformers(_: Callable[[str], None]) -> None:
    mask = type("LowerTriangularMask", (), {"__init__": lambda self, *_, **__: None})
    attend = _attention_functions()["flash_attn_func"]

    def attend_efficiently(
        query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0, scale: Any = None, **_: Any
    ) -> Tensor:
        return attend(query, key, value, p, scale, isinstance(attn_bias, mask))

    _module("xformers")
    _module("xformers.ops", memory_efficient_attention=attend_efficiently, LowerTriangularMask=mask)


@no_type_check
def _triton(note: Callable[[str], None]) -> None:
    """Triton, whose kernels do nothing."""
    # These check once whether Triton is installed, and must not find the stand-in.
    has_triton_package()
    importlib.import_module("torch._inductor.runtime.triton_compat")

    class Kernel:
        """A user's kernel: its tensors are made by the function that launches it, and counted; its work is not."""

        def __init__(self, function: Any) -> None:
            functools.update_wrapper(self, function)
            self.fn, self.name = function, function.__name__

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return self

        def __call__(self, *_: Any, **__: Any) -> None:
            if not torch.compiler.is_compiling():
                note(f"Triton is not installed: the work of {self.name} is not counted")

        def run(self, *_: Any, **__: Any) -> None:
            self()

    def jit(function: Any = None, **_: Any) -> Any:
        return Kernel if function is None else Kernel(function)

    def decorated(*_: Any, **__: Any) -> Any:
        return lambda kernel: kernel

    _module(
        "triton", jit=jit, autotune=decorated, heuristics=decorated, Config=Silent("Config"),
        cdiv=lambda x, y: -(-x // y), next_power_of_2=lambda n: 1 << max(0, int(n) - 1).bit_length(),
        set_allocator=lambda *_: None,
    )  # fmt: skip
    for name in ("triton.language", "triton.runtime"):
        _module(name).__getattr__ = _silent_name
    _module("triton.tools")
    _module("triton.tools.tensor_descriptor", TensorDescriptor=Silent("TensorDescriptor"))


@no_type_check
def _sentencepiece(note: Callable[[str], None]) -> None:
    class Processor(_Vocabulary):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            note(f"sentencepiece is not installed: its vocabulary is taken to have {self.size:,} ids")

    _module("sentencepiece", SentencePieceProcessor=Processor)


class _Vocabulary:
    """A tokenizer's model whose file is absent; its name often says how large it is."""

    def __init__(self, model_file: Any = "", **_: Any) -> None:
        numbers = [int(each) for each in re.findall(r"\d{3,6}", str(model_file).rpartition("/")[2])]
        self.size = numbers[-1] if numbers else 32_000

    def Load(self, model_file: Any) -> bool:
        self.__init__(model_file)
        return True

    load = Load

    def vocab_size(self) -> int:
        return self.size

    get_piece_size = GetPieceSize = piece_size = __len__ = vocab_size

    def id_to_piece(self, _: int) -> str:
        return "a"

    IdToPiece = id_to_piece

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.lower().startswith("encode"):
            return lambda text, *_, **__: [1] * max(1, len(text) // 4)
        return lambda *_, **__: False


@no_type_check
def _tiktoken(note: Callable[[str], None]) -> None:
    """Encodings of tiktoken, which it would download."""
    sizes = {"gpt2": 50257, "r50k_base": 50257, "p50k_base": 50281, "cl100k_base": 100277, "o200k_base": 200019}

    class Encoding:
        def __init__(self, name: str) -> None:
            self.name, self.n_vocab = name, sizes.get(name, 100277)
            self.max_token_value = self.eot_token = self.n_vocab - 1
            self._special_tokens = {"<|endoftext|>": self.eot_token}
            self.special_tokens_set = set(self._special_tokens)

        def encode(self, text: str, **_: Any) -> list[int]:
            return [ord(each) % 256 for each in text[::4]] or [0]

        encode_ordinary = encode

        def encode_batch(self, texts: Sequence[str], **_: Any) -> list[list[int]]:
            return [self.encode(text) for text in texts]

        encode_ordinary_batch = encode_batch

        def encode_single_token(self, _: Any) -> int:
            return self.eot_token

        def decode(self, tokens: Sequence[int], **_: Any) -> str:
            return " text" * len(tokens)

        def decode_single_token_bytes(self, _: int) -> bytes:
            return b" text"

    def get_encoding(name: str) -> Any:
        note(f"encoding '{name}' of tiktoken is not here: a quarter as many ids as letters stand for a text")
        return Encoding(name)

    spec = importlib.machinery.PathFinder.find_spec("tiktoken")
    if spec is None or spec.loader is None:
        models = lambda model: get_encoding("o200k_base" if "4o" in model else "cl100k_base")  # noqa: E731
        _module("tiktoken", get_encoding=get_encoding, encoding_for_model=models, Encoding=Encoding)
        return
    sys.modules["tiktoken"] = tiktoken = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiktoken)
    real = tiktoken.get_encoding

    def get(name: str) -> Any:
        try:
            return real(name)
        except Exception:
            return get_encoding(name)

    tiktoken.get_encoding = get


class Images(torch.utils.data.Dataset):
    """A data set of torchvision: black pictures of its size, transformed as the script says."""

    channels, side, n_classes = 3, 224, 1000

    def __init__(
        self, *args: Any, transform: Any = None, target_transform: Any = None, image_size: Any = None,
        num_classes: int | None = None, size: int | None = None, **_: Any,
    ) -> None:  # fmt: skip
        for each in args:
            transform = each if callable(each) else transform
            image_size = each if isinstance(each, (tuple, list)) and len(each) == 3 else image_size
        self.transform, self.target_transform = transform, target_transform
        self.shape = tuple(image_size or (self.channels, self.side, self.side))
        self.classes = [str(each) for each in range(num_classes or self.n_classes)]
        self.class_to_idx = {name: index for index, name in enumerate(self.classes)}
        self.n = size or N_IMAGES
        self.targets = [index % len(self.classes) for index in range(self.n)]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Any, int]:
        picture, label = torch.zeros(self.shape), self.targets[int(index)]
        picture = picture if self.transform is None else self.transform(picture)
        return picture, label if self.target_transform is None else self.target_transform(label)


@no_type_check
def _torchvision(note: Callable[[str], None]) -> None:
    """torchvision's data sets and transforms; its models have no stand-in."""

    def made(name: str, channels: int, side: int, classes: int) -> type:
        def start(self, *args: Any, **kwargs: Any) -> None:
            Images.__init__(self, *args, **kwargs)
            note(f"torchvision is not installed: pictures of {name} are taken to be {self.shape}")

        return type(name, (Images,), {"channels": channels, "side": side, "n_classes": classes, "__init__": start})

    def resized(size: Any = None, *_: Any, **__: Any) -> Any:
        sides = (size, size) if isinstance(size, int) else tuple(size) * (2 if len(size) == 1 else 1)
        return lambda picture: picture.new_zeros((*picture.shape[:-2], *sides))

    def gray(num_output_channels: int = 1) -> Any:
        return lambda picture: picture.new_zeros((num_output_channels, *picture.shape[-2:]))

    class Compose:
        def __init__(self, transforms: Sequence[Any]) -> None:
            self.transforms = transforms

        def __call__(self, picture: Any) -> Any:
            for each in self.transforms:
                picture = each(picture)
            return picture

    cropped = dict.fromkeys(("Resize", "CenterCrop", "RandomCrop", "RandomResizedCrop"), resized)
    names = {"Compose": Compose, "Lambda": lambda function: function, "Grayscale": gray, **cropped}

    def unchanged(name: str) -> Any:
        _silent_name(name)
        return lambda *_, **__: lambda picture: picture

    _module("torchvision")
    _module("torchvision.datasets", **{name: made(name, *sizes) for name, sizes in IMAGES.items()})
    for name in ("transforms", "transforms.v2"):
        _module(f"torchvision.{name}", InterpolationMode=Silent("InterpolationMode"), **names).__getattr__ = unchanged
    _module("torchvision.utils").__getattr__ = _silent_name


_MAKERS: dict[str, Callable[[Callable[[str], None]], None]] = {
    "flash_attn": _flash_attention,
    "flash_attn_interface": _flash_attention_3,
    "kernels": _kernels,
    "sentencepiece": _sentencepiece,
    "tiktoken": _tiktoken,
    "torchvision": _torchvision,
    "triton": _triton,
    "xformers": _xformers,
}
"""Functions that make the stand-ins which compute or return something, by package."""
