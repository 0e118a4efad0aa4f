"""Text of pages: what is kept and how it is marked, what a page says of itself, and pages that mean harm."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napkin.extraction import HtmlLimits, NotExtracted, extract_html
from napkin.extraction.html_page import parsed_size

_SENTENCE = (
    "The committee met on Tuesday, heard three witnesses, and decided after four hours to wait for another report."
)
_PROSE = "".join(f"<p>{_SENTENCE} Part {number}.</p>" for number in range(6))

_PAGE = f"""<!DOCTYPE html><html lang="en-GB"><head><title>A report | Site</title>
<meta property="og:title" content="A report &amp; more"><link rel="canonical" href="https://example.org/report">
<meta property="article:published_time" content="2019-11-19T07:03:25+00:00"></head>
<body><nav><ul><li><a href="/">Home</a></li><li><a href="/news">News</a></li></ul></nav>
<div class="cookie-banner"><p>We use cookies, which help us to serve you. Accept all of them.</p></div>
<article class="article-body"><h2>What was decided</h2>{_PROSE}
<ul><li>first thing, which was said</li><li>second thing<ul><li>a part of it</li></ul></li></ul>
<ol><li>one of the witnesses</li><li>another of them</li></ol>
<blockquote><p>We shall wait, and then we shall see what is to be done about it.</p></blockquote>
<pre>def f(x):
    return x  &lt; 2
</pre><p>Call <code>f(1)</code> or<br>do not: {_SENTENCE}</p>
<table><tr><th>name</th><th>age</th></tr><tr><td>Ann</td><td>41</td></tr></table>
<p>Advertisement</p></article>
<div class="share-buttons"><a href="#">Facebook</a> <a href="#">Twitter</a></div>
<div id="comments"><h3>Comments</h3><p>I think this is a very bad idea, and I have said so.</p></div>
<div class="related-posts"><ul><li><a href="/1">Another report that you may like</a></li></ul></div>
<footer><p>Copyright 2019, all rights reserved. Text under
<a rel="license" href="https://creativecommons.org/licenses/by/4.0/">CC BY</a></p></footer></body></html>"""


def test_structure_is_marked_and_boilerplate_left_out() -> None:
    page = extract_html(_PAGE.encode())
    paragraphs = "\n\n".join(f"{_SENTENCE} Part {number}." for number in range(6))
    assert page.text == (
        f"## What was decided\n\n{paragraphs}\n\n"
        "- first thing, which was said\n- second thing\n    - a part of it\n\n"
        "1. one of the witnesses\n2. another of them\n\n"
        "> We shall wait, and then we shall see what is to be done about it.\n\n"
        "```\ndef f(x):\n    return x  < 2\n```\n\n"
        f"Call `f(1)` or\ndo not: {_SENTENCE}\n\n"
        "| name | age |\n| --- | --- |\n| Ann | 41 |"
    )
    assert page.encoding == "utf-8"


def test_a_page_says_its_title_language_address_date_and_licence() -> None:
    said = extract_html(_PAGE.encode()).metadata
    assert said.title == "A report & more"
    assert said.language == "en-GB"
    assert said.canonical == "https://example.org/report"
    assert said.published == "2019-11-19T07:03:25+00:00"
    assert said.licence == "https://creativecommons.org/licenses/by/4.0/"


def test_plain_text_has_no_marks_and_all_text_is_kept_where_asked() -> None:
    plain = extract_html(_PAGE.encode(), markdown=False).text
    assert plain.startswith("What was decided\n\nThe committee")
    assert "name\tage\nAnn\t41" in plain
    assert "`" not in plain
    everything = extract_html(_PAGE.encode(), main_content=False, markdown=False).text
    for words in ("Home", "We use cookies", "Advertisement", "Facebook", "very bad idea", "all rights reserved"):
        assert words in everything
        assert words not in plain


@pytest.mark.parametrize(
    ("encoding", "mark", "header", "declared"),
    [
        ("utf-8", b"", "", ""),
        ("utf-8", b"\xef\xbb\xbf", "iso-8859-1", ""),
        ("utf-16-le", b"\xff\xfe", "", ""),
        ("utf-16-be", b"\xfe\xff", "", ""),
        ("cp1251", b"", "windows-1251", ""),
        ("cp1251", b"", "", "windows-1251"),
        ("koi8-r", b"", "koi8-r", "windows-1251"),
        ("cp1251", b"", "", ""),
        ("cp1251", b"", "no-such-encoding", "hex"),
    ],
)
def test_the_encoding_is_that_of_mark_header_page_or_bytes(
    encoding: str, mark: bytes, header: str, declared: str
) -> None:
    text = "Комитет собрался во вторник, выслушал трёх свидетелей и решил подождать ещё одного доклада."
    meta = f'<meta charset="{declared}">' if declared else ""
    data = mark + f"<html><head>{meta}</head><body><p>{text}</p></body></html>".encode(encoding)
    page = extract_html(data, charset=header)
    assert page.text == text
    assert page.encoding == encoding


def test_invalid_bytes_become_replacement_characters() -> None:
    page = extract_html(b"<p>" + _SENTENCE.encode() + b" \xff\xfe\x80 and more.</p>", charset="utf-8")
    assert page.text == f"{_SENTENCE} \ufffd\ufffd\ufffd and more."


_END = f"<p>{_SENTENCE}</p>".encode()


@pytest.mark.parametrize(
    "data",
    [
        b"<div>" * 100_000 + _END,
        b"<span>" * 100_000 + _END,
        b"<blockquote>" * 20_000 + _END,
        b"<ul><li>" * 20_000 + _END,
        b"<div class='" + b"comment " * 100_000 + b"'>" + _END,
        b"\0" * 100_000 + _END,
        b"<svg>" * 20_000 + b"</svg>" * 20_000 + _END,
    ],
    ids=["div", "span", "quotations", "lists", "class", "NUL", "svg"],
)
def test_a_sentence_is_found_under_what_is_heaped_on_it(data: bytes) -> None:
    assert extract_html(data).text.endswith(_SENTENCE)


def test_references_are_decoded_and_do_not_multiply() -> None:
    assert extract_html(b"&amp;" * 100_000).text == "&" * 100_000
    assert extract_html(b"&#x1F600;" * 50_000).text == "\U0001f600" * 50_000
    assert extract_html(b"x&nbsp;&lt;&amp;lt;&gt;&shy;y").text == "x <&lt;>y"


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"".join(b"<b id=%d>" % i for i in range(3000)) + b"<p>x" * 3000, "page elements"),
        (b"<i>" + b"<div>" * 300_000, "page elements"),
        (b"<div " + b" ".join(b"a%d" % i for i in range(50_000)) + b">", "attributes of a tag"),
        (b"x" * 20_000_001, "page bytes"),
    ],
)
def test_pages_over_a_limit_are_named_before_they_are_parsed(data: bytes, rule: str) -> None:
    with pytest.raises(NotExtracted) as error:
        extract_html(data)
    assert error.value.rule == rule


def test_as_many_elements_are_expected_as_the_parser_makes() -> None:
    from resiliparse.parse.html import HTMLTree

    random_tags = random.Random(5)
    for _ in range(30):
        tags = [
            "<b>",
            "<i class=a>",
            "<i class=b>",
            "<p>",
            "<div>",
            "</b>",
            "</i>",
            "</div>",
            "x",
            "<a href=#>",
            "</a>",
        ]
        page = "".join(random_tags.choices(tags, k=random_tags.randrange(400)))
        body = HTMLTree.parse(f"<html><head></head><body>{page}").body
        assert body is not None
        made = len(body.query_selector_all("*"))
        assert parsed_size(page.encode(), 10**9, 10**9)[0] >= made - 1


@pytest.mark.parametrize("data", [b"", b"\0", b"<", b"<!--", b"<script>", b"<plaintext>", b'<a href="', b"</", b"<p>&"])
def test_pages_without_text_have_none(data: bytes) -> None:
    assert len(extract_html(data).text) <= len(data)


@given(
    st.lists(
        st.sampled_from([*"<>/!-'\"=& ", "<b>", "</p>", "<pre>", "<table>", "<td>", "&nbsp;", "x", "\xff", "<!--"])
    )
)
@settings(max_examples=60, deadline=None)
def test_no_bytes_raise(parts: list[str]) -> None:
    extract_html("".join(parts).encode("latin-1"), main_content=False)


def test_limits_are_the_callers() -> None:
    with pytest.raises(NotExtracted, match="page bytes: 10 > 9"):
        extract_html(b"0123456789", limits=HtmlLimits(most_bytes=9))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<h1>River story</h1><div>", "</div>"),
        ('<div class="page"><h1>River story</h1><div class="content">', "</div></div>"),
        (
            '<article><header><h1>River <em>story</em></h1><p>By Jane Doe</p></header><div class="body">',
            "</div></article>",
        ),
        ('<div id="a"><div><h1>River story</h1></div></div><div id="b"><section>', "</section></div>"),
        ("<h1>River story</h1>", ""),
        ('<h1><a href="/">My Site</a></h1><h1>River story</h1><div>', "</div><h1>Newsletter</h1>"),
        ("<h1>My Site</h1><h1><a href='/river'>River story</a></h1><div>", "</div>"),
    ],
)
def test_the_main_heading_stands_above_the_text_wherever_the_text_is(before: str, after: str) -> None:
    page = (
        f"<html><head><title>River story | My Site</title></head><body>{before}{_PROSE}{after}<p>(c)</p></body></html>"
    )
    nav = '<nav><a href="/">Home</a> <a href="/news">News</a></nav>'
    # A page without any element around its text has nothing that keeps its navigation apart.
    for html in (page, page.replace("<body>", f"<body>{nav}"))[: 2 if after else 1]:
        text = extract_html(html.encode()).text
        assert text.startswith(f"# River story\n\n{_SENTENCE} Part 0.")
        assert text.count("River story") == 1
        assert "My Site" not in text


@pytest.mark.parametrize(
    "heading",
    [
        "<h1>My Site</h1>",
        '<h1><a href="/elsewhere">Another story</a></h1>',
        '<h1 class="visually-hidden">Menu</h1>',
        "<nav><h1>Sections</h1></nav>",
        "<h1></h1>",
    ],
)
def test_what_is_not_the_heading_of_the_page_is_left_out(heading: str) -> None:
    page = f"<html><head><title>River story | My Site</title></head><body>{heading}<div>{_PROSE}</div></body></html>"
    assert extract_html(page.encode()).text.startswith(f"{_SENTENCE} Part 0.")


@pytest.mark.parametrize(
    ("title", "headings", "chosen"),
    [
        ("My Site - River story of May", "<h1>River story of May</h1>", "River story of May"),
        ("My Site: River story of May", "<h1>My Site</h1><h1>River story of May</h1>", "River story of May"),
        ("River story of May - My Site", "<h1>River story of May</h1><h1>My Site</h1>", "River story of May"),
        ("Riverside news", "<h1>River</h1><h1>Letters</h1>", "Letters"),
        ("Berlin - Wikipedia", "<h1>Berlin</h1>", "Berlin"),
        ("Berlin - Wikipedia", "<h1>Wikipedia</h1>", ""),
    ],
)
def test_the_heading_is_the_longest_part_of_the_title_at_either_end(title: str, headings: str, chosen: str) -> None:
    page = f"<html><head><title>{title}</title></head><body>{headings}<div>{_PROSE}</div></body></html>"
    text = extract_html(page.encode()).text
    assert text.partition(_SENTENCE)[0] == (f"# {chosen}\n\n" if chosen else "")


def test_the_heading_that_stands_apart_can_be_left_out() -> None:
    page = f"<body><h1>River story</h1><div>{_PROSE}</div></body>".encode()
    with_heading, without = extract_html(page).text, extract_html(page, heading=False).text
    assert with_heading == f"# River story\n\n{without}"
