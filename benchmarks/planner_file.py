"""The planner as one file, opened from the disk in Chromium: its rule and its count beside the plan of the whole step.

    python benchmarks/planner_file.py                 # some minutes; needs chromium
    python benchmarks/planner_file.py --models gpt2 llama-3-8b --on 64xH100-SXM-80GB

The file's count is the sum of a layout's parts; `napkin plan` counts the whole step of the fullest device. The table
is also written to benchmarks/results/.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from napkin.planning.planner import plan
from napkin.studio.planner_file import write_planner_file
from napkin.studio.plans import first_request, recipe_of
from result_files import heading, write_result

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from oracles.browser import Browser  # pyright: ignore[reportMissingImports]

MODELS = (
    "gpt2 gpt2-xl llama-3.2-1b llama-2-7b llama-3-8b mistral-7b qwen2.5-14b gemma-3-4b olmo-2-7b deepseek-moe-16b"
).split()
ROW = """(name) => [...document.querySelectorAll('#figures tbody tr')]
  .find((row) => row.children[0].innerText === name).innerText.split('\\t').slice(1, 3)"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--on", default="8xH100-SXM-80GB", help="devices, as the file counts them")
    options = parser.parse_args()
    lines = heading("The planner as one file beside whole plans")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "planner.html")
        counted = write_planner_file(path, counted_on=[options.on], models=options.models)
        lines += [f"{counted} plans in a file of {path.stat().st_size / 1e3:.0f} kB, on {options.on}", ""]
        lines += ["| model | memory: rule | file | whole step | step: rule | file | whole step |"]
        lines += ["|---|---:|---:|---:|---:|---:|---:|"]
        print("\n".join(lines[-4:]), flush=True)
        with Browser(Path(folder, "profile")) as browser:
            for model in options.models:
                lines.append(line_of(browser, path, model, options.on))
                print(lines[-1], flush=True)
        assert not browser.complaints, browser.complaints
    write_result("planner-file", lines)


def line_of(browser: Browser, path: Path, model: str, on: str) -> str:
    """A model's memory of the fullest device and seconds of a step, as the page shows them and as they are planned."""
    n, _, device = on.partition("x")
    browser.open("about:blank")
    browser.open(f"{path.as_uri()}#preset={model}&n={n}&device={device}")
    browser.wait_for("['count', 'refused'].includes(document.body.dataset.ready)")
    whole = plan(recipe_of(first_request(model, on)), on)
    cells = [model]
    figures = (
        ("memory of the fullest device", whole.peak_bytes, "bytes"),
        ("seconds per step", whole.seconds_per_step, "seconds"),
    )
    for name, value, unit in figures:
        cells += [each or "by rule" for each in browser.run(f"({ROW})('{name}')")]
        cells.append(browser.run(f"FORMATS.{unit}({value!r})"))
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
