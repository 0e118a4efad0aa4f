"""Where benchmarks leave their tables: a file a run, named for what was measured and when."""

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def write_result(name: str, lines: Iterable[str]) -> None:
    """Keep the lines of a table in results/, beside those of earlier runs, and say where."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{datetime.now(UTC):%Y-%m-%d-%H%M%S}.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"\nwrote {path}")
