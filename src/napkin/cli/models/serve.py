"""`napkin serve` serves a model over HTTP, `napkin bench-serve` sends a load to a server."""

import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from napkin.cli.common.options import INLINED, JsonOption, Switch, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.errors import NapkinError
from napkin.files import regular
from napkin.inference.settings import Speculation
from napkin.serving.limits import Limits
from napkin.units import format_count, format_seconds

if TYPE_CHECKING:
    from napkin.inference.service_load import ServiceMeasurement


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
    """Sequences that are computed at the same time; further ones wait."""
    cache_bytes: int | None = None
    """Bytes for keys and values of all sequences; None takes what the engine finds fitting."""
    weights: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the weights and of their products; auto is bf16 where the device multiplies it natively."""
    kv: Literal["auto", "int8"] = "auto"
    """Number format of keys and values: auto is the format of the weights; int8 takes about half the bytes of bf16."""
    batch_invariant: Switch = False
    """Compute each sequence alone: its answer is then the same, bit for bit, whatever else runs; many requests together
    take longer."""
    prefix_bytes: int = 0
    """When the server stops, keep up to this many bytes of keys and values, those of the beginnings of prompts and
    answers, in this user's private cache folder for the next server of the same model; 0 keeps none."""
    speculation: Annotated[Speculation, INLINED] = field(default_factory=Speculation)
    limits: Annotated[Limits, INLINED] = field(default_factory=Limits)


@command("serve", ServeOptions)
def serve_command(options: ServeOptions) -> None:
    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise NapkinError(f"napkin serve needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    if not 0 <= options.port < 2**16:
        raise NapkinError(f"--port is {options.port}: use 0 to {2**16 - 1}")
    if options.max_running < 1:
        raise NapkinError(f"--max-running is {options.max_running}: use 1 or more")
    if options.prefix_bytes < 0:
        raise NapkinError(f"--prefix-bytes is {options.prefix_bytes}: use 0 or more")
    key = _key(options.api_key_file)
    from napkin.serving.loopback import is_loopback
    from napkin.serving.run import serve

    if key is None and not is_loopback(options.host):
        raise NapkinError(
            f"--host {options.host} can be reached from elsewhere: give a key, by --api-key-file or {KEY_VARIABLE}"
        )
    with progress_line("opening the model"):
        from napkin.inference.loaded_model import load
        from napkin.inference.prefix_store import PrefixStore

        prefixes = PrefixStore(options.prefix_bytes) if options.prefix_bytes else None
        opened = load(options.model, name=options.name, weights=options.weights, on_message=notify)
        engine = opened.engine(
            options.speculation,
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

    serve(
        opened,
        engine,
        host=options.host,
        port=options.port,
        key=key,
        limits=options.limits,
        prefixes=prefixes,
        on_start=started,
        on_message=notify,
    )


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


PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class BenchServeOptions(JsonOption):
    """Send requests to a server with OpenAI's completions interface, and print the latencies and throughput that they
    see. With --run, a plan of the same model on this machine's engine stands beside it."""

    address: Annotated[str, tyro.conf.Positional] = "http://127.0.0.1:8000"
    """Address of the server."""
    requests: int = 64
    """Number of requests."""
    concurrency: int = 16
    """Clients that each send their next request when the last one has ended."""
    rate: float | None = None
    """Requests per second at random moments (a Poisson process), instead of --concurrency."""
    input_tokens: int = 128
    """Tokens of each prompt: random ids below --vocab-size."""
    output_tokens: int = 64
    """Tokens that each request generates."""
    vocab_size: int = 256
    """Ids of random prompts are below it."""
    prompts: str | None = None
    """Text file with a prompt per line, instead of random ids; --input-tokens is then what the plan assumes."""
    api_key_file: str | None = None
    """File with the server's key."""
    run: str | None = None
    """The run or folder that is served on this machine: its plan is printed beside the measurement."""
    seed: int = 0
    """Seed of the prompts and of the times at which they are sent."""


@command("bench-serve", BenchServeOptions)
def bench_serve_command(options: BenchServeOptions) -> None:
    from napkin.inference.service_load import ServiceLoad
    from napkin.serving.http_load import Endpoint, measure_http_load, random_prompts

    if options.vocab_size < 1:
        raise NapkinError(f"--vocab-size is {options.vocab_size}: use 1 or more")
    load = ServiceLoad(
        options.requests,
        options.input_tokens,
        options.output_tokens,
        concurrency=None if options.rate is not None else options.concurrency,
        rate=options.rate,
        seed=options.seed,
    )
    endpoint = Endpoint.of(options.address, _read(options.api_key_file).strip() if options.api_key_file else None)
    if options.prompts is None:
        prompts: list[Any] = random_prompts(load, options.vocab_size)
    else:
        prompts = [line for line in _read(options.prompts).splitlines() if line.strip()]
        if not prompts:
            raise NapkinError(f"'{options.prompts}' holds no prompt: write one per line")
    planned = None
    if options.run is not None:
        with progress_line("timing steps of the engine") as line:
            from napkin.inference import Engine, loaded_model
            from napkin.planning import plan_service

            # Opened as `napkin serve` does.
            model = loaded_model.load(options.run, weights="auto").model
            plan = plan_service(
                model,
                concurrency=load.concurrency,
                input_tokens=load.input_tokens,
                output_tokens=load.output_tokens,
                requests=load.requests,
                rate=load.rate,
                seed=load.seed,
                cache_bytes=Engine(model).cache.nbytes,
                progress=line.retitle,
            )
            planned = plan.degrees[0].simulation
    with progress_line("sending requests") as line:
        measured = measure_http_load(
            endpoint, load, prompts, progress=lambda done: line.retitle(f"{done} of {load.requests} requests")
        )
    if options.json:
        print_json({"planned": planned and _figures(planned), "measured": _figures(measured)})
        return
    _print(measured, planned)


def _print(measured: "ServiceMeasurement", planned: "ServiceMeasurement | None") -> None:
    rows: list[tuple[str, ...]] = []
    for what, of in (("time to first token", "first_token"), ("time per output token", "per_token")):
        for percentile in PERCENTILES:
            meter = getattr(measured, of)(percentile)
            row = (f"{what}, {percentile}%", format_seconds(meter))
            if planned is not None:
                plan = getattr(planned, of)(percentile)
                row = (row[0], format_seconds(plan), row[1], f"{plan / meter:.2f}" if meter else "")
            rows.append(row)
    heading = ("", "meter") if planned is None else ("", "plan", "meter", "plan/meter")
    print_table(heading, rows, align="l" + "r" * (len(heading) - 1))
    tokens = sum(each.output_tokens for each in measured.served)
    beside = "" if planned is None else f", {planned.tokens_per_second:,.1f} planned"
    say(
        f"{len(measured.served)} requests, {tokens:,} tokens in {format_seconds(measured.seconds)}: "
        f"{measured.tokens_per_second:,.1f} tokens per second{beside}"
    )


def _figures(found: "ServiceMeasurement") -> dict[str, Any]:
    return {
        "requests": len(found.served),
        "seconds": found.seconds,
        "tokens_per_second": found.tokens_per_second,
        "time_to_first_token": {percent: found.first_token(percent) for percent in PERCENTILES},
        "time_per_output_token": {percent: found.per_token(percent) for percent in PERCENTILES},
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NapkinError(f"'{path}' cannot be read ({error}): name a text file") from None
