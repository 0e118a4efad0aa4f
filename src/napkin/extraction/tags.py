"""The elements of HTML as extraction sees them: each tag has a number, and its number a kind.

Words of `class`, `id`, `role` and `itemprop`, the names that a page gives its elements, become bits. Names are read as
words: `relatedPosts`, `related-posts` and `related_posts` are alike `-related-posts-`. A pattern with
a hyphen begins or ends with a word. All patterns are searched at once by an automaton (Aho & Corasick 1975), whose
table compiled code walks along the attribute.
"""

from collections import deque
from functools import cache

import numpy as np
from numpy.typing import NDArray

# Kinds. A phrase is a part of the text around it; a block ends that text and begins its own; of what is skipped no text
# is read; an empty element has no end tag; the content of a raw one is not markup.
PHRASE, BLOCK, SKIPPED, EMPTY, RAW = range(5)

_PHRASES = (
    "a span b i em strong u s strike font small big sup sub abbr acronym cite code kbd samp var tt mark q del ins dfn"
    " time data bdi bdo ruby rt rp rb nobr label output slot picture"
).split()
_BLOCKS = (
    "html head body div p section article main aside nav header footer h1 h2 h3 h4 h5 h6 ul ol li dl dt dd table"
    " thead tbody tfoot tr td th caption blockquote pre figure figcaption form fieldset legend address details summary"
    " center hgroup menu search"
).split()
_SKIPPED = (
    "template noscript svg math object canvas audio video select datalist button textarea dialog map applet"
    " frameset title"
).split()
_EMPTY = "br hr img wbr input area base col embed link meta param source track basefont bgsound frame keygen".split()
_RAW = "script style xmp iframe noembed noframes plaintext".split()

FORMATTING = "a b big code em font i nobr s small strike strong tt u".split()
"""Elements that a parser opens again in each block until they are closed."""

NAMES: tuple[str, ...] = ("", *_PHRASES, *_BLOCKS, *_SKIPPED, *_EMPTY, *_RAW)
"""The tag with each number; 0 is any other, which is a block: elements that a page has invented."""
TAG: dict[str, int] = {name: number for number, name in enumerate(NAMES)}

N_SLOTS = 1024

PLACES: dict[str, str] = {
    "article": "article",
    "main": "main",
    "aside": "aside",
    "nav": "nav menu",
    "header": "header hgroup",
    "footer": "footer",
    "figure": "figure figcaption caption",
    "list": "ul ol dl",
    "table": "table",
    "quotation": "blockquote",
    "form": "form fieldset label search",
    "code": "pre",
    "section": "section",
    "heading": "h1 h2 h3 h4 h5 h6",
    "paragraph": "p",
    "address": "address",
}
"""Places of text by the tags above it; a bit each, from `FIRST_PLACE` on, beside those of evidence."""
FIRST_PLACE = 16
PLACE_BIT: dict[str, int] = {name: FIRST_PLACE + number for number, name in enumerate(PLACES)}


def name_hash(name: bytes) -> int:
    """The hash of a tag or attribute's name, as compiled code computes it: 64 bits, signed."""
    value = 0
    for byte in name:
        value = (value * 31 + byte) & 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value


@cache
def tag_table() -> NDArray[np.int64]:
    """Rows of hash, number, kind and place, [1024, 4]: a name is at its hash modulo 1024 or soon after."""
    table = np.zeros((N_SLOTS, 4), np.int64)
    # Ordered by the number of each kind.
    kinds = [(name, kind) for kind, names in enumerate((_PHRASES, _BLOCKS, _SKIPPED, _EMPTY, _RAW)) for name in names]
    places = {tag: PLACE_BIT[name] for name, tags in PLACES.items() for tag in tags.split()}
    for name, kind in kinds:
        key = name_hash(name.encode())
        slot = key % N_SLOTS
        while table[slot, 0]:
            slot = (slot + 1) % N_SLOTS
        table[slot] = key, TAG[name], kind, 1 << places[name] if name in places else 0
    return table


PATTERNS: dict[str, str] = {
    "article body": (
        "articlebody article-body- -entry-content- -post-content- -story-body- -article-content- -post-body-"
        " -article-text- -body-copy- -story-content- -content-body- -body-text- -post-text- -article-copy-"
        " -entry-text- -articletext- -storybody- -articlecontent- -postcontent- -entrycontent- -bodycopy-"
        " -rich-text- -richtext- -story-text- -main-text- -page-content- -body-content- -text-body- -news-text-"
        " -news-content- -mw-parser-output-"
    ),
    "content": (
        "-article content- -story -entry- -post- -text- -body- -main- -prose- -markdown- -document- -paragraph"
    ),
    "comment": ("comment disqus -discussion -respond- -replies -reply- livefyre -feedback- -reviews- -conversation"),
    "share": (
        "-share sharing- -social -addthis -addtoany -facebook -twitter -whatsapp -pinterest -email- -follow-"
        " -sns- sharebar sharebox sharetool -tweet- -linkedin"
    ),
    "related": (
        "-related recommend -more- -readmore -read-next -readnext -trending -popular -most- -also- -outbrain"
        " -taboola -latest- -teaser -upnext -up-next -next- -prev- -previous- -carousel -slider -similar -suggest"
        " -card -feed- -stories- -headlines- -listing- -zergnet -revcontent -recirc -recent -timeline- -series-"
        " -onward- -further- -see-also- -posts- -articles- -promos- -grid-"
    ),
    "navigation": (
        "-nav- navigation -navbar -menu menu- breadcrumb toolbar pagination -pager- -header- -masthead -topbar"
        " -skip- -tabs- -tab- -dropdown -toc- -navbox -hamburger -drawer- -off-canvas -offcanvas -sitemap- -links-"
        " -jump- -subnav -topnav"
    ),
    "sidebar": (
        "sidebar -side- -rail- -aside- -widget -right-col -rightcol -leftcol -column-right- -complementary-"
        " -infobox- -secondary- -col-right- -right-rail- -rightrail-"
    ),
    "footer": "-footer -copyright -legal- -disclaimer -colophon -bottom- -contentinfo- -foot- -end-of-",
    "advertisement": (
        "-ad- -ads- advert -sponsor -banner -promo -dfp- -gpt- -adsense -adslot -adunit -partner -affiliate"
        " -commercial- -marketing- -deal -shop -buy- -product -merch"
    ),
    "form": (
        "newsletter -subscri -signup -sign-up- -login -log-in- -register- -registration -cookie -consent -gdpr"
        " -modal -popup -pop-up- -overlay -paywall -search -donat -optin -opt-in- -cta- -form- -membership-"
        " -notification -alert- -privacy- -notice-"
    ),
    "metadata": (
        "-byline -author -meta- -metadata- -date- -datetime -timestamp -published -tags- -tag- -category"
        " -categories -kicker- -bio- -biography -credit -rating -views- -info- -topics- -label- -posted-"
        " -edit-section- -editsection- -dateline -updated- -contributor -source- -reading-time- -eyebrow-"
        " -keywords-"
    ),
    "picture": (
        "-caption figcaption -photo -gallery -slideshow -image -img- -figure -media- -video -player- -thumb -pic-"
        " -embed -iframe -audio -infographic"
    ),
    "hidden": (
        "-hidden- -sr-only- -screen-reader -screenreader -visually-hidden- -visuallyhidden- -noprint- -no-print-"
        " -print-only- -invisible- -hide- -offscreen- -assistive- -nodisplay- -collapsed- -tooltip"
    ),
    "heading": (
        "-headline -title- -subtitle- -standfirst- -lede- -lead- -dek- -deck- -summary- -subhead -intro -excerpt-"
        " -abstract- -description- -teaser-text- -strapline-"
    ),
}
"""Patterns by what they are evidence of; bit i of an element's evidence is the i-th of these."""

BIT: dict[str, int] = {name: number for number, name in enumerate(PATTERNS)}
_LETTERS = 27


@cache
def automaton() -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """The next state of [state, letter], where letter 0 is the hyphen; and the evidence found at each state."""
    children: list[dict[int, int]] = [{}]
    found = [0]
    for number, patterns in enumerate(PATTERNS.values()):
        for pattern in patterns.split():
            state = 0
            for character in pattern:
                letter = 0 if character == "-" else ord(character) - ord("a") + 1
                if letter not in children[state]:
                    children[state][letter] = len(children)
                    children.append({})
                    found.append(0)
                state = children[state][letter]
            found[state] |= 1 << number
    table = np.zeros((len(children), _LETTERS), np.uint32)
    fallback = [0] * len(children)
    queue = deque([0])
    while queue:
        state = queue.popleft()
        for letter in range(_LETTERS):
            after = int(table[fallback[state], letter]) if state else 0
            child = children[state].get(letter)
            if child is None:
                table[state, letter] = after
                continue
            table[state, letter] = child
            fallback[child] = after
            # Breadth first: the state to fall back to is nearer to the root, and complete.
            found[child] |= found[after]
            queue.append(child)
    return table, np.array(found, np.int64)
