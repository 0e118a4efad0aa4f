"""Log-likelihoods of multiple choice beside those of lm-evaluation-harness's own Hugging Face backend, on one folder.

A model of random weights is written as a Hugging Face folder. Items are passages of Python's library with four
continuations; with four letters, whose only token the harness computes once for all four; and with continuations after
five examples that all items share. Three ways give the log-likelihoods of the same requests: the harness with
transformers, the harness with napkin's adapter, and the harness's client of OpenAI's completions against
`napkin serve`, on fewer items. What differs is printed, also from transformers in fp64, with seconds and ratios.

    pip install lm_eval[hf,api]
    python benchmarks/evaluation.py                                    # 2,000 items
    python benchmarks/evaluation.py --items 500 --threads 1 --clock cpu     # on a machine that is busy

The table is also written to benchmarks/results/.
"""

import argparse
import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from napkin.data.corpus import standard_library
from napkin.data.token_file import SEPARATOR
from napkin.hardware.host import detect_host
from napkin.inference.lm_eval_adapter import harness_model
from napkin.model.config import ModelConfig
from napkin.model.huggingface import save_huggingface
from napkin.model.transformer import Transformer
from napkin.tokenizer import train_bpe
from result_files import heading, write_result
from turns import BRACKETS, in_turns, ratio_spread, spread

SHOTS = 5
KINDS = ("continuations", "letters", "after examples")
Found = list[tuple[float, bool]]


def write_folder(folder: Path) -> None:
    """A model of 4 layers whose tokenizer knows Python's library."""
    texts = [document.text for document in standard_library()][:60]
    tokenizer = train_bpe(texts, 4096, special_tokens=[SEPARATOR])
    config = ModelConfig(vocab_size=tokenizer.vocab_size, context_length=1024, d_model=256, n_layers=4, n_heads=4)
    torch.manual_seed(0)
    model = Transformer(config).eval()
    save_huggingface(model, folder, tokenizer=tokenizer)


def requests_of(n_items: int, kind: str) -> list[Any]:
    """Four requests for each item: a passage, and what might follow it."""
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]

    draw = random.Random(0)
    texts = [document.text for document in standard_library() if len(document.text) > 2000]
    examples = "".join(f"Which text follows?\n{text[500:900].strip()}\n\n" for text in texts[:SHOTS])
    found = []
    for number in range(n_items):
        text = draw.choice(texts)
        start = draw.randrange(len(text) - 1000)
        context = f"{examples * (kind == 'after examples')}Which text follows?\n{text[start : start + 400].strip()}"
        if kind == "letters":
            choices = [" A", " B", " C", " D"]
        else:
            places = [start + 400, *(draw.randrange(len(text) - 100) for _ in range(3))]
            choices = [f" {text[place : place + draw.randint(40, 80)].strip()}." for place in places]
        for choice in choices:
            found.append(
                Instance(request_type="loglikelihood", doc={}, arguments=(context, choice), idx=len(found) % 4)
            )
            found[-1].doc_id = number
    return found


def transformers_model(folder: Path, batch_size: int, dtype: str = "float32") -> Any:
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    return HFLM(pretrained=str(folder), device="cpu", dtype=dtype, batch_size=batch_size)


@contextlib.contextmanager
def client_of_server(folder: Path) -> Iterator[Any]:
    """The harness's client, and `napkin serve` for it."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI  # pyright: ignore[reportMissingImports]

    program = [sys.executable, "-m", "napkin", "serve", str(folder), "--port", "0", "--weights", "fp32"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            address = next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
            yield LocalCompletionsAPI(
                model=folder.name,
                base_url=f"{address.rstrip('/').removesuffix('/v1')}/v1/completions",
                tokenizer_backend="huggingface",
                tokenizer=str(folder),
                batch_size=16,
                num_concurrent=2,
                add_bos_token=True,
            )
        finally:
            server.terminate()


def timed(model: Any, requests: Sequence[Any], clock: Callable[[], float]) -> tuple[Found, float]:
    begin = clock()
    return model.loglikelihood(list(requests), disable_tqdm=True), clock() - begin


def answer(
    answers: dict[str, Found], name: str, model: Any, requests: Sequence[Any], clock: Callable[[], float]
) -> float:
    """Keep a model's answers under its name; returns the seconds."""
    answers[name], seconds = timed(model, requests, clock)
    return seconds


def differences(found: Found, expected: Found) -> str:
    """The largest one, and how many items have another likeliest choice."""
    largest = max(abs(one - other) for (one, _), (other, _) in zip(found, expected, strict=True))
    picks = [
        [max(range(4), key=lambda number, start=start: each[start + number][0]) for start in range(0, len(each), 4)]
        for each in (found, expected)
    ]
    return f"{largest:.1e} | {sum(one != other for one, other in zip(*picks, strict=True))}"


def _cells(found: Found, expected: Found, distance: str) -> str:
    largest, others = differences(found, expected).split(" | ")
    return f"{largest} | {distance} | {others}"


def main() -> None:
    """Print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="of the Hugging Face backend")
    parser.add_argument("--threads", type=int, default=detect_host().cores)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: seconds of all threads together")
    options = parser.parse_args()
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    for package in ("lm_eval", "transformers", "tenacity"):
        if find_spec(package) is None:
            parser.error(f"{package} is not installed: pip install lm_eval[hf,api]")
    torch.set_num_threads(options.threads)
    head = heading(
        "Log-likelihoods beside lm-evaluation-harness",
        f"fp32; seconds by the {options.clock} clock. {BRACKETS}",
        packages=["lm_eval", "transformers"],
    )
    lines = [
        "| items | by | seconds | × | largest difference, nats | from fp64, 50 items | other choices |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        write_folder(folder)
        ours, theirs = harness_model(folder), transformers_model(folder, options.batch_size)
        torch.set_num_threads(options.threads)
        exact = transformers_model(folder, options.batch_size, "float64")
        for kind in KINDS:
            # Examples make each request several times as long.
            n_items = options.items // 10 if kind == "after examples" else options.items
            requests = requests_of(n_items, kind)
            for model in (ours, theirs):
                timed(model, requests[:40], clock)
            answers: dict[str, Found] = {}
            turns = {
                name: partial(answer, answers, name, model, requests, clock)
                for name, model in (("theirs", theirs), ("ours", ours))
            }
            slow, fast = in_turns(turns, options.rounds).values()
            expected, found = answers["theirs"], answers["ours"]
            truth, _ = timed(exact, requests[:200], clock)
            distances = [differences(each[:200], truth).split(" |")[0] for each in (expected, found)]
            lines += [
                f"| {n_items:,}, {kind} | lm_eval, transformers | {spread(slow, '{:.1f}'.format)} | 1.00 | | "
                f"{distances[0]} | |",
                f"| | lm_eval, napkin | {spread(fast, '{:.1f}'.format)} | {ratio_spread(slow, fast)} | "
                f"{_cells(found, expected, distances[1])} |",
            ]
            with client_of_server(folder) as client:
                few = requests[:200]
                served, seconds = timed(client, few, time.perf_counter)
                distance = differences(served, truth).split(" |")[0]
                lines.append(
                    f"| {len(few) // 4:,}, {kind} | local-completions, napkin serve | {seconds:.1f} (wall) | | "
                    f"{_cells(served, expected[: len(few)], distance)} |"
                )
            print("\n".join(lines[-3:]), flush=True)
    print("\n".join(lines), flush=True)
    write_result("evaluation", [*head, *lines])


if __name__ == "__main__":
    main()
