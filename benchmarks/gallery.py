"""Makes the pictures of docs/gallery.md: commands run in a folder of their own, and what they leave is photographed.

    python benchmarks/gallery.py            # all, some minutes; needs chromium
    python benchmarks/gallery.py planner    # one of them

Pictures are SVG files that commands write, and screenshots of pages in JPEG, each below 150 kB.
"""

import argparse
import base64
import itertools
import json
import random
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
NAPKIN = [sys.executable, "-m", "napkin"]
LARGEST = 150_000
"""Bytes of a picture."""
WIDTH = 1280
QUALITY = 72
LEARN = "number-formats strides bpe roofline step-memory pipelines isoflop scaling-law batching advantages".split()
SMALL = "--training.steps 200 --model.n-layers 2 --model.d-model 128 --training.batch-size 8".split()
BOUNDARY = "\n<|endoftext|>\n"

WRITER = "--training.steps 400 --training.batch-size 8 --model.context-length 128 --model.n-layers 2".split()
WRITER += "--model.n-heads 4 --optimizer.learning-rate 0.003".split()
PARAGRAPH = re.compile(r"^[A-Z][^|`\[\]\n]{120,600}\.$", re.MULTILINE)
"""Plain sentences, without code, links and tables."""

SECTION = re.compile(r"^(?=#+ )", re.MULTILINE)
STAGES = "gopher gopher-repetition fineweb near-duplicates personal-data".split()

SMALLER = "--training.steps 80 --training.batch-size 4 --model.context-length 128".split()
SMALLER += "--model.n-heads 2 --model.n-layers 1".split()
GRID = "--model.d-model 32,64,128 --optimizer.learning-rate 0.001,0.003,0.01".split()
SENTENCE = re.compile(r"(?:^- |[.;] )([A-Z][\w ,'-]{40,120})[.:;(]", re.MULTILINE)


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
                print(name, flush=True)
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
    subprocess.run([*NAPKIN, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def photograph(browser: Browser, picture: Path, *, height: int | None = 900) -> None:
    """The top of a page as it is now, or all of it, without the name of the folder that will be gone."""
    browser.size(WIDTH, height or 600)
    if height is None:
        browser.size(WIDTH, browser.run("document.documentElement.scrollHeight"))
    browser.run("document.getElementById('where')?.replaceChildren('2 below this folder')")
    browser.run("new Promise((done) => setTimeout(done, 300))")
    taken = browser.do("Page.captureScreenshot", format="jpeg", quality=QUALITY)
    picture.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def studio(folder: Path, *options: str) -> Iterator[tuple[str, str]]:
    """A studio of a folder: its address, and that with the token."""
    command = [*NAPKIN, "studio", "--port", "0", *options]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
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


def of_studio(
    browser: Browser,
    folder: Path,
    path: str,
    picture: Path,
    *,
    ready: str = "",
    use: Callable[[Browser], None] = lambda _: None,
    options: tuple[str, ...] = (),
    height: int | None = 900,
) -> None:
    """A page of the studio, once a condition is true and `use` has done with it what a person would. A height of None
    is that of the page."""
    with studio(folder, *options) as (address, with_token):
        browser.open(with_token)
        browser.open(address + path)
        drawn = "document.body.dataset.drawn > 0 && !document.querySelector('.working')"
        browser.wait_for(ready or drawn)
        use(browser)
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


def writers(folder: Path) -> Path:
    """Two runs of other widths, on paragraphs of the docs that they see often enough to write such sentences."""
    place = folder / "writers"
    if place.exists():
        return place
    place.mkdir()
    pages = (page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    prose = [line for page in pages for line in PARAGRAPH.findall(page)]
    (place / "prose.txt").write_text(BOUNDARY.join(prose))
    napkin(place, "tokenizer", "train", "prose.txt", "--vocab-size", "1024")
    napkin(place, "tokenizer", "encode", "prose.txt", "--out", "data")
    for name, width in (("wide", "128"), ("narrow", "32")):
        napkin(place, "train", "--run", name, *WRITER, "--model.d-model", width)
    return place


def compare(browser: Browser, folder: Path) -> None:
    """Two models that continue the same text, before the vote, below it the votes on earlier texts."""
    place = writers(folder)
    text = (place / "prose.txt").read_text()
    prompts = [" ".join(paragraph.split()[:8]) for paragraph in text.split(BOUNDARY)[6::12]]

    def asked(prompt: str) -> list[int]:
        """The number of places in each answer where two words follow each other as somewhere in the paragraphs."""
        browser.run("document.querySelector('#new').click()")
        browser.run("document.querySelector('#text').focus()")
        browser.type(prompt)
        browser.press("Enter")
        browser.wait_for("document.querySelector('[data-verdict]') !== null")
        answers = browser.run("[...document.querySelectorAll('.answer .body')].map((each) => each.textContent)")
        return [sum(f"{a} {b}" in text for a, b in itertools.pairwise(answer.split())) for answer in answers]

    def use(browser: Browser) -> None:
        fields = {"first": "wide", "second": "narrow", "mode": "text"}
        for name, value in {**fields, "temperature": "0.3", "max_tokens": "96", "seed": "1"}.items():
            field = f"document.querySelector('#{name}')"
            browser.run(f"{field}.value = '{value}', {field}.dispatchEvent(new Event('change'))")
        browser.wait_for("document.querySelectorAll('#about p').length === 2 && !/opening/.test(about.textContent)")
        likeness = {}
        for prompt in prompts:
            one, other = asked(prompt)
            likeness[prompt] = max(one, other)
            verdict = "a" if one > other else "b" if other > one else "tie"
            browser.run(f"document.querySelector('[data-verdict={verdict}]').click()")
            browser.wait_for("document.querySelector('.verdict-row').textContent.startsWith('your vote')")
        # The server draws the order: the better answer is to be on the left in every picture.
        best = max(prompts, key=lambda prompt: likeness[prompt])
        one, other = asked(best)
        while one < other:
            one, other = asked(best)

    ready, votes = "'ready' in document.body.dataset", ("--allow-actions",)
    of_studio(browser, place, "/chat", PICTURES / "compare.jpg", ready=ready, use=use, options=votes, height=None)


def data(browser: Browser, folder: Path) -> None:
    """What a pipeline left of the sections of the docs, and the documents that a rule dropped."""
    place = folder / "curation"
    sections = place / "sections"
    sections.mkdir(parents=True)
    for page in sorted((ROOT / "docs").glob("*.md")):
        documents = [part.strip() for part in SECTION.split(page.read_text()) if part.strip()]
        (sections / f"{page.stem}.txt").write_text(BOUNDARY.join(documents))
    stages = "".join(f'\n[[stage]]\nname = "{name}"\n' for name in STAGES)
    (place / "pipeline.toml").write_text(f'[input]\npaths = ["sections"]\n{stages}')
    napkin(place, "data", "run", "pipeline.toml", "--out", "corpus")

    def use(browser: Browser) -> None:
        rules = "[...document.querySelectorAll('.rules button')]"
        browser.run(f"{rules}.find((each) => each.textContent.startsWith('lines without punctuation')).click()")
        browser.wait_for("document.querySelectorAll('#documents mark').length > 0")

    ready = "'ready' in document.body.dataset"
    of_studio(browser, place, "/data", PICTURES / "data.jpg", ready=ready, use=use, height=860)


def swept(folder: Path) -> Path:
    """A sweep of nine runs. Six are evaluated: on sentences of the changelog beside the same with two neighbouring
    words exchanged, and on the text of the front page."""
    place = folder / "swept"
    if place.exists():
        return place
    trained(folder)
    place.mkdir()
    written = subprocess.run([*NAPKIN, "recipe", *SMALLER], cwd=folder, check=True, capture_output=True).stdout
    (folder / "smaller.toml").write_bytes(written)
    napkin(folder, "sweep", "smaller.toml", "--runs", "swept/rates-and-widths", *GRID)
    draw, pairs = random.Random(0), []
    for sentence in SENTENCE.findall((ROOT / "CHANGELOG.md").read_text()):
        words = sentence.split()
        at = draw.randrange(len(words) - 1)
        swapped = [*words[:at], words[at + 1], words[at], *words[at + 2 :]]
        pairs.append(json.dumps({"good": sentence, "bad": " ".join(swapped)}))
    (folder / "word-order.jsonl").write_text("\n".join(pairs))
    (folder / "front-page.md").write_bytes((ROOT / "README.md").read_bytes())
    sample = "--text front-page.md --max-tokens 2048 --seed 0".split()
    for path in [*place.glob("*/*=0.003"), *place.glob("*/*=0.01")]:
        run = str(path.relative_to(folder))
        napkin(folder, "evaluate", "task", run, "--task", "word-order.jsonl")
        napkin(folder, "evaluate", "text", run, *sample)
    return place


def sweep(browser: Browser, folder: Path) -> None:
    """The runs of a sweep as lines across its fields, and as a table."""
    ready = "document.body.dataset.ready === 'scaling'"
    of_studio(browser, swept(folder), "/scaling", PICTURES / "sweep.jpg", ready=ready, height=None)


def evaluations(browser: Browser, folder: Path) -> None:
    """The charts of six models' scores on a task and of their bits per byte; the table below has wider rows."""

    def use(browser: Browser) -> None:
        browser.run("document.querySelector('#table-part').hidden = true")

    ready, picture = "document.body.dataset.ready === 'evaluations'", PICTURES / "evaluations.jpg"
    of_studio(browser, swept(folder), "/evaluations", picture, ready=ready, use=use, height=None)


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
    "compare": compare,
    "data": data,
    "sweep": sweep,
    "evaluations": evaluations,
    "report": report,
    "profile": profile,
    "law": law,
    "pipeline": pipeline,
}

if __name__ == "__main__":
    main()
