"""A command counts without torch._dynamo, and whatever needs it afterwards gets the real one, once."""

import json
import subprocess
import sys

COMMAND = "count --preset gpt2 --model.n-layers 1 --training.recompute full --json".split()
COUNT = f"""
import contextlib, io, json, sys
from napkin.cli import main

def counted():
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert main({COMMAND!r}) == 0
    return json.loads(told.getvalue())
"""
WITHOUT = """
before = counted()
assert "torch._dynamo.convert_frame" not in sys.modules
"""
LOADED = """
import torch, torch._dynamo
before = counted()
assert type(torch._dynamo).__name__ == "module"
"""
AFTERWARDS = """
import torch
from torch._compile import _disable_dynamo

@_disable_dynamo
def left_alone(x):
    return x + (100 if torch.compiler.is_compiling() else 1)

assert left_alone(torch.ones(1)).item() == 2
import torch._dynamo.source
assert torch._dynamo is sys.modules["torch._dynamo"] and type(torch._dynamo).__name__ == "module"
assert torch._dynamo.source is sys.modules["torch._dynamo.source"]
assert torch._dynamo.source.LocalSource is torch._dynamo.variables.builder.LocalSource
assert torch._dynamo.source.__spec__.origin.endswith("source.py")
graphs = []

def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward

compiled = torch.compile(lambda x: 3 * left_alone(2 * x), backend=backend)
assert compiled(torch.ones(1)).item() == 9 and len(graphs) == 2
assert counted() == before
"""
TOLD = """
print(json.dumps(before))
"""


def run(*parts: str) -> dict:
    done = subprocess.run([sys.executable, "-c", "".join(parts)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_count_needs_no_dynamo_is_the_same_with_it_and_leaves_the_real_one_to_others() -> None:
    assert run(COUNT, WITHOUT, AFTERWARDS, TOLD) == run(COUNT, LOADED, TOLD)
