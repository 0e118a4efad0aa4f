"""The ideas in the order of a course, and the pages that show them."""

from napkin.studio.learn.batching import BATCHING
from napkin.studio.learn.idea import Idea
from napkin.studio.learn.laws import ISOFLOP, LAW
from napkin.studio.learn.merges import MERGES
from napkin.studio.learn.numbers import NUMBERS
from napkin.studio.learn.ranks import PIPELINES, RINGS
from napkin.studio.learn.rewards import REWARDS
from napkin.studio.learn.steps import MEMORY, ROOFLINE
from napkin.studio.learn.views import VIEWS
from napkin.studio.page_files import page, top_of, with_top

LEARN = "/learn"
_COURSE = (MERGES, VIEWS, NUMBERS, ROOFLINE, MEMORY, PIPELINES, RINGS, ISOFLOP, LAW, BATCHING, REWARDS)
IDEAS: dict[str, Idea] = {idea.name: idea for idea in _COURSE}


def index_page() -> str:
    """The page of all ideas."""
    return page(LEARN).replace("{tiles}", "\n".join(idea.tile for idea in IDEAS.values()))


def idea_page(name: str) -> str | None:
    """The page of an idea; None where there is none of that name."""
    idea = IDEAS.get(name)
    return None if idea is None else idea.page(with_top("learn.html", top_of(LEARN)))
