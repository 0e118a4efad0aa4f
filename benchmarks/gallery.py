"""Makes the pictures of docs/gallery.md: commands run in a folder of their own, and what they leave is photographed.

    python benchmarks/gallery.py            # all, some minutes; needs chromium
    python benchmarks/gallery.py planner    # one of them

Pictures are SVG files that commands write, and screenshots of pages in JPEG, each below 150 kB.
"""

import argparse
import base64
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from oracles.browser import Browser  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
LARGEST = 150_000
"""Bytes of a picture."""
WIDTH = 1280
QUALITY = 72
LEARN = "number-formats strides bpe roofline step-memory pipelines isoflop scaling-law batching advantages".split()
SMALL = "--training.steps 200 --model.n-layers 2 --model.d-model 128 --training.batch-size 8".split()


def main() -> None:
    """Make the pictures that are named, or all."""
    known = [*MAKERS, *(f"learn-{idea}" for idea in LEARN)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all by default: {', '.join(known)}")
    wanted: list[str] = parser.parse_args().names or known
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"no picture is named {', '.join(unknown)}; there are {', '.join(known)}")
    PICTURES.mkdir(exist_ok=True)
    # Children of a killed Chromium may write to its profile for a moment longer.
    with tempfile.TemporaryDirectory(prefix="napkin-gallery-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        with Browser(folder / "profile", width=WIDTH, height=800) as browser:
            browser.do("Emulation.setScrollbarsHidden", hidden=True)
            for name in wanted:
                if name.startswith("learn-"):
                    of_studio(browser, folder, f"/learn/{name.removeprefix('learn-')}", PICTURES / f"{name}.jpg")
                else:
                    MAKERS[name](browser, folder)
    for picture in sorted(PICTURES.iterdir()):
        size = picture.stat().st_size
        print(f"{picture.name}: {size:,} bytes")
        assert size < LARGEST, f"{picture} has {size:,} bytes: the limit is {LARGEST:,}"


def napkin(folder: Path, *words: str) -> None:
    """Run a command in a folder."""
    subprocess.run([sys.executable, "-m", "napkin", *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def photograph(browser: Browser, picture: Path, *, height: int = 900) -> None:
    """The top of a page as it is now, without the name of the folder that will be gone."""
    browser.size(WIDTH, height)
    browser.run("document.getElementById('where')?.replaceChildren('2 below this folder')")
    browser.run("new Promise((done) => setTimeout(done, 300))")
    taken = browser.do("Page.captureScreenshot", format="jpeg", quality=QUALITY)
    picture.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def studio(folder: Path) -> Iterator[tuple[str, str]]:
    """A studio of a folder: its address, and that with the token."""
    command = [sys.executable, "-m", "napkin", "studio", folder, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = None
    while found is None:
        line = process.stdout.readline()
        assert line, "the studio has ended"
        found = re.search(r"(http://127\.0\.0\.1:\d+)/\?token=\S+", line)
    try:
        yield found[1], found[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def of_studio(browser: Browser, folder: Path, path: str, picture: Path, *, ready: str = "", height: int = 900) -> None:
    """A page of the studio, once a condition is true."""
    with studio(folder) as (address, with_token):
        browser.open(with_token)
        browser.open(address + path)
        drawn = "document.body.dataset.drawn > 0 && !document.querySelector('.working')"
        browser.wait_for(ready or drawn)
        photograph(browser, picture, height=height)


def planner(browser: Browser, folder: Path) -> None:
    """The planner, with the count of the server."""
    ready = "document.body.dataset.ready === 'count'"
    of_studio(browser, folder, "/planner#preset=llama-3-8b", PICTURES / "planner.jpg", ready=ready)


def trained(folder: Path) -> Path:
    """Two small runs that differ in one field."""
    runs = folder / "trained"
    if not runs.exists():
        napkin(folder, "tokenizer", "train", str(ROOT / "docs"), "--suffixes", ".md", "--vocab-size", "1024")
        napkin(
            folder,
            "tokenizer",
            "encode",
            str(ROOT / "docs"),
            "--suffixes",
            ".md",
            "--out",
            "data",
            "--inline-boundaries",
        )
        for rate in ("0.003", "0.0003"):
            out = str(runs / f"rate-{rate}")
            napkin(folder, "train", "--run", out, "--optimizer.learning-rate", rate, *SMALL)
    return runs


def runs(browser: Browser, folder: Path) -> None:
    """Two runs beside each other."""
    place = trained(folder)
    ready = "document.querySelectorAll('#charts canvas').length > 2"
    of_studio(browser, place, "/runs", PICTURES / "runs.jpg", ready=ready)


def report(browser: Browser, folder: Path) -> None:
    """The report of a run."""
    browser.open((trained(folder) / "rate-0.003" / "report.html").as_uri())
    photograph(browser, PICTURES / "report.jpg", height=1000)


def profile(browser: Browser, folder: Path) -> None:
    """Where the time of a step goes."""
    recipe = (trained(folder) / "rate-0.003" / "recipe.toml").relative_to(folder)
    napkin(folder, "profile", str(recipe), "--steps", "2", "--page", "profile.html")
    browser.open((folder / "profile.html").as_uri())
    browser.run("document.querySelector('svg')?.scrollIntoView()")
    photograph(browser, PICTURES / "profile.jpg", height=1000)


def law(browser: Browser, folder: Path) -> None:
    """A scaling law of the example's runs."""
    napkin(folder, "law", "fit", "example", "--drop-highest", "5", "--page", "law.html")
    browser.open((folder / "law.html").as_uri())
    photograph(browser, PICTURES / "law.jpg", height=1000)


def pipeline(browser: Browser, folder: Path) -> None:
    """A step of a pipeline, as a plan's picture."""
    words = "plan --preset llama-3-8b --training.batch-size 64 --training.micro-batch-size 1 --training.recompute "
    words += "selective --training.loss-chunk-size 4096 --on 16xH100 --parallelism.pipeline 4 --parallelism.data 4"
    napkin(folder, *words.split(), "--timeline", "pipeline.svg")
    (PICTURES / "pipeline.svg").write_bytes((folder / "pipeline.svg").read_bytes())


MAKERS: dict[str, Callable[[Browser, Path], None]] = {
    "planner": planner,
    "runs": runs,
    "report": report,
    "profile": profile,
    "law": law,
    "pipeline": pipeline,
}

if __name__ == "__main__":
    main()
