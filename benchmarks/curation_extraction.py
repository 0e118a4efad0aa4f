"""HTML to text: napkin beside trafilatura and resiliparse on a published benchmark, one core, one process.

    python benchmarks/curation_extraction.py FOLDER
    python benchmarks/curation_extraction.py FOLDER --fit

FOLDER is that of scrapinghub/article-extraction-benchmark: `ground-truth.json` and `html/*.html.gz`. F1 is as defined
there: 4-grams of the words (`\\w+`) of a page, as a multiset; precision and recall averaged over pages; F1 of the two
averages. `--fit` writes the weights of blocks, `src/napkin/extraction/block_weights.toml`, fitted on the pages
whose SHA-256 is even. Of the odd ones only the three averages were seen; one constant (`_BEST_CHARACTERS`) was chosen
by those of all pages, so that new pages may score lower than they do. The articles of the benchmark have no headlines:
the row "with headings" shows what those that stand apart from a text cost there.

The peers are `pip install trafilatura lxml_html_clean`, and resiliparse's own `extract_plain_text`.
"""

import argparse
import gzip
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from napkin.extraction import extract_html
from napkin.extraction.compiled import fields as f
from napkin.extraction.html_page import NAMES, block_features
from napkin.extraction.page_metadata import decode_page
from napkin.extraction.rendering import page_tables
from result_files import existing, heading
from turns import BRACKETS, spread

_WORD = re.compile(r"\w+")
_REPEATS = 6
_RIDGE = 2e-3
_WEIGHTS = Path(__file__).parents[1] / "src/napkin/extraction/block_weights.toml"
Score = tuple[int, int, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=existing)
    parser.add_argument("--fit", action="store_true")
    arguments = parser.parse_args()
    heading("HTML to text beside its peers, one core", BRACKETS)
    truth = json.loads((arguments.folder / "ground-truth.json").read_text())
    pages = {key: gzip.decompress((arguments.folder / "html" / f"{key}.html.gz").read_bytes()) for key in sorted(truth)}
    texts = {key: truth[key]["articleBody"] for key in pages}
    if arguments.fit:
        fit({key: page for key, page in pages.items() if is_even(key)}, texts)
    print(f"{len(pages)} pages, {sum(map(len, pages.values())) / 1e6:.1f} MB; F1 of all, even (fitted) and odd pages")
    for name, extract in extractors():
        extract(next(iter(pages.values())))
        seconds: list[float] = []
        found: dict[str, str] = {}
        for _ in range(_REPEATS):
            start = time.perf_counter()
            found = {key: extract(page) for key, page in pages.items()}
            seconds.append(time.perf_counter() - start)
        scores = {key: score(found[key], texts[key]) for key in pages}
        whole = summary(scores.values())
        even, odd = (summary(s for key, s in scores.items() if is_even(key) is half)[0] for half in (True, False))
        print(
            f"{name:<24} F1 {whole[0]:.4f} (even {even:.4f}, odd {odd:.4f}), precision {whole[1]:.4f},"
            f" recall {whole[2]:.4f}, {spread([len(pages) / each for each in seconds], '{:.1f}'.format)} pages/s",
            flush=True,
        )


def extractors() -> Iterable[tuple[str, Callable[[bytes], str]]]:
    """napkin, and the peers that are installed."""
    yield "napkin", lambda page: extract_html(page, markdown=False, heading=False).text
    yield "napkin, with headings", lambda page: extract_html(page, markdown=False).text
    yield "napkin, Markdown", lambda page: extract_html(page).text
    from resiliparse.extract.html2text import extract_plain_text

    yield "resiliparse", lambda page: extract_plain_text(decode_page(page)[0], main_content=True)
    try:
        import trafilatura  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        print(f"trafilatura is missing ({error}): pip install trafilatura lxml_html_clean")
    else:
        yield "trafilatura", lambda page: trafilatura.extract(page) or ""
        yield "trafilatura, no comments", lambda page: trafilatura.extract(page, include_comments=False) or ""


def is_even(key: str) -> bool:
    return int(key, 16) % 2 == 0


def grams(text: str, n: int = 4) -> Counter[tuple[str, ...]]:
    words = _WORD.findall(text)
    return Counter(tuple(words[i : i + n]) for i in range(max(1, len(words) - n + 1))) if words else Counter()


def score(text: str, truth: str) -> Score:
    """True positives, false positives, false negatives."""
    found, wanted = grams(text), grams(truth)
    true = sum((found & wanted).values())
    return true, sum(found.values()) - true, sum(wanted.values()) - true


def summary(scores: Iterable[Score]) -> tuple[float, float, float]:
    """F1, precision and recall."""
    rows = list(scores)
    precision = sum(1.0 if fp == fn == 0 else tp / (tp + fp) if tp else 0.0 for tp, fp, fn in rows) / len(rows)
    recall = sum(1.0 if fp == fn == 0 else tp / (tp + fn) if tp else 0.0 for tp, fp, fn in rows) / len(rows)
    return 2 * precision * recall / (precision + recall), precision, recall


def fit(pages: dict[str, bytes], truth: dict[str, str]) -> None:
    """Logistic regression with ridge, in which each page counts alike and a block by the root of its words."""
    from scipy.optimize import minimize

    x, y, weights = (np.concatenate(part) for part in zip(*(_samples(pages[k], truth[k]) for k in pages), strict=True))
    weights /= weights.sum()
    ridge = np.full(x.shape[1], _RIDGE)
    ridge[0] = 0

    def loss(theta: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        z = x @ theta
        gradient = x.T @ (weights * (1 / (1 + np.exp(-z)) - y)) + ridge * theta
        return float(weights @ (np.logaddexp(0, z) - y * z) + ridge @ theta**2 / 2), gradient

    found = minimize(loss, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B", options={"maxiter": 1000})
    lines = [f'"{name}" = {value:.4f}' for name, value in zip(NAMES, found.x, strict=True)]
    text = (
        f"# Written by benchmarks/curation_extraction.py --fit, on {len(pages)} pages of\n"
        "# scrapinghub/article-extraction-benchmark (MIT): those whose SHA-256 is even.\n[weights]\n"
    )
    _WEIGHTS.write_text(text + "\n".join(lines) + "\n")


def _samples(page: bytes, truth: str) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Of each block the features, the share of its 4-grams that the truth has, and its weight."""
    from resiliparse.parse.html import HTMLTree

    tables = page_tables(str(HTMLTree.parse(decode_page(page)[0])).encode(), 10**6)
    assert tables is not None
    wanted, running = grams(truth), f" {' '.join(_WORD.findall(truth))} "
    labels = []
    for begin, stop in tables.blocks[:, (f.BEGIN, f.STOP)].tolist():
        text = tables.text[begin:stop].decode()
        words = _WORD.findall(text)
        if len(words) >= 4:
            found = grams(text)
            labels.append(sum((found & wanted).values()) / sum(found.values()))
        else:
            labels.append(float(bool(words) and f" {' '.join(words)} " in running))
    weights = np.sqrt(tables.blocks[:, f.WORDS] + 1.0)
    return block_features(tables).astype(np.float64), np.array(labels), weights / weights.sum()


if __name__ == "__main__":
    main()
