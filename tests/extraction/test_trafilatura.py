"""trafilatura, an extractor of its own, reads pages whose main text is known because they are made here."""

import random
import re

import pytest

from napkin.extraction import extract_html
from peers import peer

pytestmark = pytest.mark.peers

WORDS = (
    "river harbour winter engine letter garden council museum report season market village signal bridge theatre "
    "student captain machine story weather journey kitchen library mountain doctor"
).split()
LAYOUTS = (
    "<article><h1>{title}</h1>{body}</article>",
    '<main><h1>{title}</h1><div class="text">{body}</div></main>',
    '<div id="content"><h1>{title}</h1><div class="article-body">{body}</div></div>',
    '<div class="post"><h2>{title}</h2>{body}</div>',
)


def page(seed: int) -> tuple[str, list[str]]:
    """A page with navigation, a sidebar and a footer around an article, and the paragraphs of the article."""
    draw = random.Random(seed)

    def sentence() -> str:
        words = [draw.choice(WORDS) for _ in range(draw.randrange(8, 18))]
        return " ".join(["The", *words]) + "."

    paragraphs = [" ".join(sentence() for _ in range(draw.randrange(2, 6))) for _ in range(draw.randrange(5, 12))]
    body = LAYOUTS[seed % len(LAYOUTS)].format(
        title=f"About the {draw.choice(WORDS)}", body="".join(f"<p>{each}</p>" for each in paragraphs)
    )
    links = "".join(f'<li><a href="/{word}">{word.title()} pages</a></li>' for word in draw.sample(WORDS, 8))
    html = (
        f"<!doctype html><html><head><title>A page</title></head><body><nav><ul>{links}</ul></nav>{body}"
        f'<aside class="sidebar"><h3>Most read</h3><ul>{links}</ul></aside>'
        f'<footer><p>Copyright 2026. <a href="/terms">Terms of use</a></p></footer></body></html>'
    )
    return html, paragraphs


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text)


@pytest.mark.parametrize("seed", range(24))
def test_an_article_is_found_by_both(seed: int) -> None:
    html, paragraphs = page(seed)
    ours = words_of(extract_html(html.encode(), markdown=False).text)
    theirs = words_of(peer("trafilatura").extract(html, include_comments=False) or "")
    article = words_of(" ".join(paragraphs))
    for found in (ours, theirs):
        assert " ".join(article) in " ".join(found)
        # The title may stand above the article.
        assert len(found) <= len(article) + 3
