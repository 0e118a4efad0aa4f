"""What the names that a page gives its elements say: words of `class`, `id`, `role` and `itemprop`, as bits.

Names are read as words: `relatedPosts`, `related-posts` and `related_posts` are alike `-related-posts-`. A pattern with
a hyphen begins or ends with a word. All patterns are searched at once by an automaton (Aho & Corasick 1975), whose
table compiled code walks along the attribute.
"""

from collections import deque
from functools import cache

import numpy as np
from numpy.typing import NDArray

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
