"""Whether a server's memory stays flat under requests of all shapes: `python benchmarks/server_memory.py`.

A server of a model with random weights, in a process of its own, gets requests from several clients at a time:
prompts and answers of any length, several choices, biases, log-probabilities, echoes, stop texts, streams read to the
end and cut, conversations, and malformed ones. Its resident memory is printed every so many requests. What a server
needs at most at a time it has needed after the first part; in the rest, memory must not rise with what is asked.
"""

import argparse
import contextlib
import http.client
import json
import random
import re
import subprocess
import sys
import threading
import time
from typing import Any

import psutil
import torch

from napkin.units import format_bytes
from result_files import heading

CONTEXT = 1024


def main() -> None:
    """Print the memory as requests go by, and how far it rose after the first part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--weights", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--serve", action="store_true", help="be the server")
    options = parser.parse_args()
    if options.serve:
        serve_random_model(options.d_model, torch.bfloat16 if options.weights == "bf16" else torch.float32)
        return
    heading("A server's memory under requests of all shapes")
    command = [sys.executable, __file__, "--serve", "--d-model", str(options.d_model), "--weights", options.weights]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline().strip().rpartition(":")[2])
        try:
            visit(port, server.pid, options.requests, options.clients)
        finally:
            server.terminate()


def serve_random_model(d_model: int, dtype: torch.dtype) -> None:
    """Serve on a free port, which is printed; tokens are bytes."""
    from napkin.inference.engine import Engine
    from napkin.inference.loaded_model import LoadedModel
    from napkin.model.config import ModelConfig
    from napkin.model.transformer import Transformer
    from napkin.serving import serve
    from napkin.tokenizer.bpe import ByteTokenizer

    torch.set_num_threads(1)
    tokenizer = ByteTokenizer(["<|endoftext|>"])
    config = ModelConfig(
        tokenizer.vocab_size, context_length=CONTEXT, d_model=d_model, n_layers=2, n_heads=4, n_kv_heads=2
    )
    model = Transformer(config, seed=0).to(dtype).eval()
    opened = LoadedModel.of(model, tokenizer, name="random")
    serve(opened, Engine(model), port=0, on_start=lambda address: print(address, flush=True))


def visit(port: int, pid: int, n_requests: int, n_clients: int) -> None:
    """Send the requests, and print the server's memory twenty times."""
    process, numbers, lock = psutil.Process(pid), iter(range(n_requests)), threading.Lock()
    sizes: list[int] = []
    begin = time.perf_counter()

    def client() -> None:
        while True:
            with lock:
                number = next(numbers, None)
                if number is None:
                    return
                if number % max(1, n_requests // 20) == 0:
                    size = process.memory_info().rss
                    sizes.append(size)
                    seconds = time.perf_counter() - begin
                    print(f"{number:6,} requests  {format_bytes(size):>8}  {seconds:6.0f} s", flush=True)
            ask(port, random.Random(number))

    threads = [threading.Thread(target=client) for _ in range(n_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sizes.append(process.memory_info().rss)
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/metrics")
    metrics = connection.getresponse().read().decode()
    print(*re.findall(r"^napkin_sequences_total.*|^napkin_kv_blocks.*", metrics, re.MULTILINE), sep="\n")
    early, late = max(sizes[: len(sizes) // 4]), max(sizes[len(sizes) // 4 :])
    print(f"most in the first quarter {format_bytes(early)}, most after it {format_bytes(late)}: {late / early:.3f}")


def ask(port: int, draw: random.Random) -> None:
    """One request of some shape."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    path, body = request(draw)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if body.get("stream") and draw.random() < 0.3:
            response.read(draw.randint(1, 2000))
            return
        response.read()


def request(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body."""
    length = int(CONTEXT ** draw.random()) - 1 or 1
    more = min(int(128 ** draw.random()), CONTEXT - length - 1)
    body: dict[str, Any] = {"max_tokens": more, "temperature": draw.choice([0, 0.7, 1.5]), "ignore_eos": True}
    text = "".join(draw.choice("etaoin shrdlu\n") for _ in range(length))
    for chance, fields in (
        (0.2, {"logit_bias": {str(draw.randrange(256)): draw.uniform(-100, 100) for _ in range(draw.randint(1, 300))}}),
        (0.2, {"n": draw.randint(2, 8)}),
        (0.2, {"repetition_penalty": draw.uniform(0.8, 1.5)}),
        (0.2, {"top_k": draw.randint(1, 300), "top_p": draw.uniform(0.1, 1)}),
        (0.2, {"stop": [draw.choice("abcdefgh") * draw.randint(1, 3)]}),
        (0.3, {"stream": True}),
        (0.05, {"temperature": -1}),
    ):
        if draw.random() < chance:
            body |= fields
    if draw.random() < 0.2:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text[: CONTEXT // 2]}]}
    if draw.random() < 0.2:
        body |= {"logprobs": draw.choice([0, 5, 50]), "echo": draw.random() < 0.5}
    prompt = list(text.encode()) if draw.random() < 0.3 else [text] * draw.choice([1, 1, 1, 3])
    return "/v1/completions", body | {"prompt": prompt}


if __name__ == "__main__":
    main()
