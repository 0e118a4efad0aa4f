"""Generation from a GGUF file: tokens per second beside llama.cpp and transformers, greedy texts beside transformers'.

Each library has the file in a process of its own and continues the same prompt of 16 tokens greedily. They take turns,
a short run each, so that what else the machine does meets all of them; the median of the ratios of neighbouring runs
counts. Processor seconds per token, of one thread, depend less on what else runs than seconds do.

    pip install transformers gguf
    python benchmarks/gguf_models.py model.gguf --llama /path/to/python/with/llama_cpp --threads 1
    python benchmarks/gguf_models.py model.gguf --texts 200    # greedy texts instead of speed
"""

import argparse
import ast
import itertools
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PROMPT = "The history of the old city by the sea begins with a small harbour where"
LIBRARIES = ("napkin", "llama.cpp", "transformers")
Run = Callable[[int], Iterator[Any]]
"""Yields so many tokens, or something after each."""


def napkin_run(path: Path, threads: int) -> Run:
    import torch

    import napkin
    from napkin.inference.generation import continue_prompt
    from napkin.inference.settings import Sampling

    opened = napkin.load(path)
    model, ids = opened.model, opened.encode_prompt(PROMPT)
    torch.set_num_threads(threads)
    return lambda n: continue_prompt(model, ids, n, Sampling(temperature=0.0, top_p=1.0))


def llama_run(path: Path, threads: int) -> Run:
    import llama_cpp  # pyright: ignore[reportMissingImports]

    model = llama_cpp.Llama(str(path), n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False)
    ids = model.tokenize(PROMPT.encode(), add_bos=False)
    return lambda n: itertools.islice(model.generate(ids, temp=0.0, repeat_penalty=1.0), n)


def transformers_run(path: Path, threads: int) -> Run:
    import torch

    torch.set_num_threads(threads)
    model, tokenizer = _transformers(path)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids

    def run(n: int) -> Iterator[Any]:
        # The library's own loop without what `generate` does around it, which is slower.
        past, new = None, ids
        for _ in range(n):
            with torch.inference_mode():
                out = model(new, past_key_values=past, use_cache=True)
                past, new = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
                token = int(new)
            yield token

    return run


def _transformers(path: Path) -> tuple[Any, Any]:
    import torch
    import transformers  # pyright: ignore[reportMissingImports]

    transformers.logging.set_verbosity_error()
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(**where)


def work(library: str, path: Path, threads: int) -> None:
    """Be a library's process: for each number on a line, the seconds and the processor seconds per token."""
    run = {"napkin": napkin_run, "llama.cpp": llama_run, "transformers": transformers_run}[library](path, threads)
    list(run(4))
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    print("answer", resident, flush=True)
    for line in sys.stdin:
        n, tokens = int(line), run(int(line) + 1)
        next(tokens)
        start, start_of_processor = time.perf_counter(), time.process_time()
        for _ in tokens:
            pass
        print("answer", (time.perf_counter() - start) / n, (time.process_time() - start_of_processor) / n, flush=True)


class Worker:
    """A library's process."""

    def __init__(self, library: str, python: str, path: Path, threads: int) -> None:
        # Where a library is in another environment, napkin's is not needed there.
        command = [python, __file__, str(path), "--worker", library, "--threads", str(threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self.library = library
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        (self.resident,) = self._answer()

    def seconds(self, n: int) -> list[float]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{n}\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> list[float]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("answer "):
                return [float(each) for each in line.split()[1:]]
        raise SystemExit(f"{self.library} has ended before it was done: its own message is above")


def compare_speed(path: Path, threads: int, rounds: int, tokens: int, llama: str | None) -> None:
    # The Python of llama.cpp may lack what napkin needs.
    from result_files import heading
    from turns import BRACKETS, ratio_spread, spread

    heading(f"Generation from {path.name}", f"{threads} threads, {rounds} rounds of {tokens} tokens. {BRACKETS}")
    pythons = {
        "napkin": sys.executable,
        "llama.cpp": llama,
        "transformers": find_spec("transformers") and sys.executable,
    }
    workers = [Worker(library, python, path, threads) for library, python in pythons.items() if python]
    taken: dict[str, list[list[float]]] = {worker.library: [] for worker in workers}
    for _ in range(rounds):
        for worker in workers:
            taken[worker.library].append(worker.seconds(tokens))
    print("| who | tokens/s | processor ms/token | MB resident | napkin is | by processor |")
    print("|---|---|---|---|---|---|")
    for worker in workers:
        of, ours = taken[worker.library], taken["napkin"]
        cells = [
            spread([1 / each[0] for each in of], "{:.1f}".format),
            spread([1e3 * each[1] for each in of]),
            f"{worker.resident / 1e6:.0f}",
            *(f"{ratio_spread([each[i] for each in of], [each[i] for each in ours])} ×" for i in range(2)),
        ]
        print(f"| {worker.library} | {' | '.join(cells)} |")
        worker.process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]


def library_prompts(n: int) -> list[str]:
    """First sentences of the docstrings of Python's own library, which is on every machine."""
    found: dict[str, None] = {}
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8", errors="replace"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                words = text.split(".")[0].split()
                if 5 <= len(words) <= 20:
                    found[" ".join(words)] = None
    step = max(1, len(found) // n)
    return list(found)[::step][:n]


def compare_texts(path: Path, n: int, tokens: int) -> None:
    """Greedy texts: every second prompt is a question of a conversation."""
    import torch

    import napkin
    from napkin.inference.generation import continue_prompt
    from napkin.inference.settings import Sampling

    opened = napkin.load(path)
    theirs, tokenizer = _transformers(path)
    equal = 0
    for number, text in enumerate(library_prompts(n)):
        asks = number % 2 == 1 and opened.has_chat_template
        ids = opened.encode_chat([("user", f"What does this mean: {text}?")]) if asks else opened.encode_prompt(text)
        if not asks and ids != tokenizer(text).input_ids:
            print(f"{number}: other tokens for {text!r}")
            continue
        settings = Sampling(temperature=0.0, top_p=1.0, stop_ids=opened.stop_ids)
        ours = [drawn.token for drawn in continue_prompt(opened.model, ids, tokens, settings)]
        with torch.inference_mode():
            made = theirs.generate(
                torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, repetition_penalty=1.0,
                attention_mask=torch.ones(1, len(ids)), eos_token_id=list(opened.stop_ids),
            )[0, len(ids) :].tolist()  # fmt: skip
        made = made[: next((i for i, each in enumerate(made) if each in opened.stop_ids), len(made))]
        if ours == made:
            equal += 1
        else:
            pairs = itertools.zip_longest(ours, made)
            place = next(i for i, (a, b) in enumerate(pairs) if a != b)
            with torch.inference_mode():
                logits = theirs(torch.tensor([ids + made[:place]])).logits[0, -1]
            (first, second), (top, other) = ((each.tolist()) for each in logits.topk(2))
            print(f"{number}: differs at token {place}: {top} and {other} are {first - second:.4f} apart there")
        if number % 10 == 9:
            print(f"{equal} of {number + 1} equal", flush=True)
    print(f"{equal} equal, of {tokens} tokens each")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--llama", help="Python with llama_cpp")
    parser.add_argument("--texts", type=int, default=0)
    parser.add_argument("--worker", choices=LIBRARIES)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.file, options.threads)
    elif not options.file.exists():
        parser.error(f"'{options.file}' does not exist: name a GGUF file")
    elif options.texts:
        compare_texts(options.file, options.texts, min(options.tokens, 16))
    else:
        compare_speed(options.file, options.threads, options.rounds, options.tokens, options.llama)


if __name__ == "__main__":
    main()
