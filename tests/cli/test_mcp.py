"""`napkin mcp`, asked by the official client over standard input: what it gives is what commands print as JSON."""

import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.peers

SMALL = {
    "model.vocab_size": 64,
    "model.d_model": 16,
    "model.n_heads": 2,
    "model.n_layers": 1,
    "model.context_length": 16,
}
TYPED = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]


def talk(with_client: Callable[[Any], Awaitable[None]]) -> None:
    """Start the server as a client's configuration does, and talk with it."""
    anyio, mcp = pytest.importorskip("anyio"), pytest.importorskip("mcp")

    async def session() -> None:
        code = "import sys; from napkin.cli import main; sys.exit(main(['mcp']))"
        server = mcp.StdioServerParameters(command=sys.executable, args=["-c", code])
        with open(os.devnull, "w") as nowhere:
            async with mcp.Client(mcp.stdio_client(server, errlog=nowhere)) as client:
                await with_client(client)

    anyio.run(session)


def test_the_tools_give_what_the_commands_print(napkin, place: Path) -> None:
    async def session(client: Any) -> None:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(listed) == {"plan", "count", "fit", "reconcile", "runs"}
        assert all(tool.description and tool.output_schema for tool in listed.values())
        answers["count"] = await client.call_tool("count", {"options": SMALL, "by": "phase", "target": "cuda"})
        answers["plan"] = await client.call_tool("plan", {"options": SMALL, "on": "2xH100"})
        answers["small"] = await client.call_tool(
            "plan", {"preset": "llama-3-8b", "on": "L4", "options": {"training.batch_size": 1}}
        )
        answers["runs"] = await client.call_tool("runs", {"folders": ["runs"], "over": "steps"})
        answers["reconcile"] = await client.call_tool("reconcile", {"run": "runs/tiny"})
        for name, arguments in REFUSED:
            refused.append(await client.call_tool(name, arguments))
        # One wrong call is nobody else's: the server goes on.
        answers["again"] = await client.call_tool("count", {"options": SMALL, "by": "phase", "target": "cuda"})

    answers: dict[str, Any] = {}
    refused: list[Any] = []
    talk(session)
    assert not any(answer.is_error for name, answer in answers.items() if name != "small"), answers
    given = {name: answer.structured_content for name, answer in answers.items()}
    assert given["count"] == json.loads(napkin("count", *TYPED, "--by=phase", "--target=cuda", "--json").out)
    assert given["again"] == given["count"]
    printed = json.loads(napkin("plan", *TYPED, "--on=2xH100", "--json").out)
    same = ("table", "seconds", "peak_by_category", "fits", "communication")
    assert {name: given["plan"][name] for name in same} == {name: printed[name] for name in same}
    assert given["runs"] == json.loads(napkin("runs", "runs", "--over=steps", "--json").out)
    measured = json.loads(Path("runs/tiny/measurement.json").read_text())
    assert given["reconcile"]["table"] == measured["table"]
    for answer, says in zip(refused, SAYS, strict=True):
        assert answer.is_error
        assert says in answer.content[0].text, answer


REFUSED = [
    ("count", {"recipe": "none.toml"}),
    ("count", {"options": {"model.d_modell": 3}}),
    ("count", {"options": {"json": 3}}),
    ("count", {"recipe": "--help"}),
    ("plan", {"on": "8xH1000"}),
    ("reconcile", {"run": "runs/none"}),
    ("fit", {"on": "H100", "batch_size": "many"}),
]
SAYS = [
    "none.toml",
    "--model.d-model",
    "'json' is not a field",
    "'--help' is not a file's name",
    "H1000",
    "runs/none",
    "batch_size",
]
