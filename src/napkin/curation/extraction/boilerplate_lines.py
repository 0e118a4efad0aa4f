"""Short lines that are not a page's own words wherever they stand: what sites say about advertising, sharing, comments.

A line is one of them as a whole; in running text the same words are left alone.
"""

import re

LONGEST = 160
"""Characters of the longest line that is compared."""

_WHOLE = (
    # Advertising.
    r"adverti[sz]ements?|adverts?|ads?|sponsored( content| links?)?|promoted( content)?|paid content|anzeige|werbung",
    r"publicité|publicidad|publicidade|pubblicità|reklam[ae]?|реклама|広告|广告",
    r"(story|article) continues (below|after)( (the )?adverti[sz]ement)?|continue reading( the main story| below)?",
    r"scroll (down )?(for more|to continue)( .*)?|loading( ?\.\.\.|…)?|please wait.{0,20}",
    # Sharing and comments.
    r"share( this)?( (article|story|page|post))?( (on|via|with) .{1,30})?",
    r"facebook|twitter|whatsapp|e?-?mail|print|tweet|pinterest",
    r"teilen|partager|compartir|compartilhar|condividi|поделиться",
    r"(\d+|no|view|show|all|read|post|leave|add|write) ?(a |all |the |\d+ )?(comments?|repl(y|ies)|responses?)",
    r"comments?( \(\d+\))?",
    r"tell us what you think.{0,20}|(what do you think|join the conversation|have your say)[?!.]?( .{0,60})?",
    r"follow .{1,80} on (twitter|facebook|instagram|youtube|linkedin)\b.{0,60}|follow us\b.{0,60}",
    r"(sign up|subscribe|register)( now| here| today| for free)?( (for|to)\b.{0,80}newsletters?.{0,40})?[.!]?",
    r"(like|join) us on (facebook|twitter|instagram).{0,40}",
    # Other pages.
    r"(read|see|watch)( (more|also|next|now))( ?:.{0,140})?",
    r"(lesen|lire|lea|leia|leggi)( (sie auch|mehr|aussi|también|também|mais|anche))( ?:.{0,140})?",
    r"(related|recommended|more)( (articles?|stories|posts?|reading|videos?|topics?|news|coverage))?( ?:.{0,140})?",
    r"siehe auch ?:.{0,140}|mehr zum thema|читайте также.{0,120}",
    r"you (may|might) (also )?(like|be interested in).{0,20}|(previous|next)( (article|post|story|page))?",
    r"(click|tap) here (to|for) .{0,80}|back to top|skip to (main )?content",
    # Pictures.
    r"(image|photo|picture)s? ?(copyright|caption|credits?|by|courtesy( of)?)\b.{0,140}|(photo|image|picture|video)s?",
    r"(credits?|photos?|images?|fotos?|bild|source|quelle) ?[:/©].{0,80}|\(?(getty( images)?|ap photo|reuters|afp)\)?",
    r"(play|watch) video|media playback is (un)?supported.{0,40}|enlarge( this image)?|hide caption|toggle caption",
    # Legal.
    r"(©|copyright\b|\(c\) ?\d{4}).{0,140}|all rights reserved.{0,40}|report (a typo|an error|this ad)",
)
_PATTERN = re.compile(r"[\W_]*(?:" + "|".join(_WHOLE) + r")[\W_]*", re.IGNORECASE)


def is_boilerplate_line(text: str) -> bool:
    """Whether a line is a site's, not the page's."""
    return len(text) <= LONGEST and _PATTERN.fullmatch(text) is not None
