"""`napkin serve`."""

import importlib.util
import os
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from napkin.cli.common.options import INLINED, Switch, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, say
from napkin.errors import NapkinError
from napkin.files import regular
from napkin.serving.limits import Limits
from napkin.units import format_count

KEY_VARIABLE = "NAPKIN_API_KEY"
_LONGEST_KEY = 4096


@dataclass(frozen=True)
class ServeOptions:
    """Serve a model over HTTP, with OpenAI's interface and a page to chat on."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN-or-FOLDER")]
    """A run, or a Hugging Face folder."""
    host: str = "127.0.0.1"
    """Address to listen on. One that other machines reach, such as 0.0.0.0, needs a key."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    api_key_file: str | None = None
    """File with the key that clients must present; without it, the key is that of the environment variable
    NAPKIN_API_KEY, if there is one."""
    name: str | None = None
    """Name of the model for clients; None is the folder's."""
    max_running: int = 16
    """Sequences that are computed at the same time; more wait."""
    cache_bytes: int | None = None
    """Bytes for keys and values of all sequences; None takes what the engine finds fitting."""
    weights: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the weights and of their products; auto is bf16 where the device multiplies it natively."""
    kv: Literal["auto", "int8"] = "auto"
    """What keys and values are held in: auto is the format of the weights; int8 takes about half the bytes of bf16."""
    batch_invariant: Switch = False
    """Compute each sequence alone: answers are then equal, bit for bit, whatever else runs, and slower together."""
    limits: Annotated[Limits, INLINED] = field(default_factory=Limits)


@command("serve", ServeOptions)
def serve_command(options: ServeOptions) -> None:
    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise NapkinError(f"napkin serve needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    if not 0 <= options.port < 2**16:
        raise NapkinError(f"--port is {options.port}: use 0 to {2**16 - 1}")
    if options.max_running < 1:
        raise NapkinError(f"--max-running is {options.max_running}: use 1 or more")
    key = _key(options.api_key_file)
    from napkin.serving.run import is_loopback, serve

    if key is None and not is_loopback(options.host):
        raise NapkinError(
            f"--host {options.host} can be reached from elsewhere: give a key, by --api-key-file or {KEY_VARIABLE}"
        )
    with progress_line("opening the model"):
        from napkin.inference.engine import Engine
        from napkin.inference.loaded_model import load

        opened = load(options.model, name=options.name, weights=options.weights, on_message=notify)
        engine = Engine(
            opened.model,
            max_running=options.max_running,
            cache_bytes=options.cache_bytes,
            batch_invariant=options.batch_invariant,
            kv=options.kv,
        )
    n_parameters = format_count(opened.n_parameters)

    def started(address: str) -> None:
        context = opened.model.config.context_length
        say(f"serving {opened.name}: {n_parameters} parameters, context of {context:,} tokens")
        say(f"{address} is the page, {address}/v1 OpenAI's interface; Ctrl-C stops after what runs")

    serve(opened, engine, host=options.host, port=options.port, key=key, limits=options.limits, on_start=started)


def _key(file: str | None) -> str | None:
    """The key; None if there is none. Raises NapkinError for one that no client could send."""
    if file is not None:
        try:
            with open(file, "rb", opener=regular) as opened:
                content = opened.read(_LONGEST_KEY + 1)
        except OSError as error:
            raise NapkinError(f"'{file}' cannot be read ({error.strerror}): name a file with the key") from None
        source, key = f"'{file}'", content.decode("latin-1").strip()
    elif KEY_VARIABLE in os.environ:
        source, key = KEY_VARIABLE, os.environ[KEY_VARIABLE]
    else:
        return None
    if not key or len(key) > _LONGEST_KEY or not (key.isascii() and key.isprintable()) or " " in key:
        raise NapkinError(
            f"{source} holds no key: put one there, of up to {_LONGEST_KEY} printable ASCII characters without spaces"
        )
    return key
