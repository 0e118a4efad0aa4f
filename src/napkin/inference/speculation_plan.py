"""What speculation gains: planned from how often proposals are accepted and from seconds, and metered.

The formulas are those of Leviathan, Kalman & Matias 2023, section 3, for proposals that are accepted independently with
probability α: of γ of them a pass keeps (1 - α^(γ+1)) / (1 - α) tokens on average.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from napkin.inference.settings import MOST_PROPOSED

_FIRST_PROPOSED = 4
_CANDIDATES = (0, 1, 2, 3, 4, 6, 8, 12, MOST_PROPOSED)
_MEMORY = 0.9
"""Weight that the past keeps with each pass: a text changes how well it can be foreseen."""


def expected_tokens(acceptance: float, proposed: int) -> float:
    """Tokens per pass of the target, equation 1: those accepted, and the one that the target draws itself."""
    if acceptance >= 1:
        return proposed + 1
    return (1 - acceptance ** (proposed + 1)) / (1 - acceptance)


def improvement(acceptance: float, proposed: int, draft_cost: float, pass_cost: float = 1.0) -> float:
    """Tokens per second over those without speculation, theorem 3.8.

    `draft_cost` is c, the seconds of a proposal over those of the target's token. `pass_cost` is what a pass of the
    target over `proposed` + 1 tokens takes over one of a single token; the theorem has 1, which holds where reading the
    weights takes all the time.
    """
    return expected_tokens(acceptance, proposed) / (proposed * draft_cost + pass_cost)


def best_proposed(
    acceptance: float, draft_cost: float, pass_cost: Callable[[int], float] = lambda proposed: 1.0
) -> int:
    """The number of proposals with the largest improvement; 0 where none improves."""
    return max(_CANDIDATES, key=lambda n: improvement(acceptance, n, draft_cost, pass_cost(n)))


@dataclass
class SpeculationMeter:
    """What came of the proposals of a generation, and the seconds of its passes. Plans the next pass by both."""

    passes: int = 0
    """Passes of the target, the one over the prompt left out."""
    tokens: int = 0
    """Tokens that came out of them."""
    proposed: int = 0
    tested: int = 0
    """Proposals that were accepted or rejected; those after a rejected one are not looked at."""
    accepted: int = 0
    seconds: float = 0.0
    """Of these passes and their proposals."""
    _recent: tuple[float, float] = (0.0, 0.0)
    _pass_seconds: dict[int, float] = field(default_factory=dict)
    _draft_seconds: float = 0.0
    _drafted: int = 0

    def add(self, proposed: int, accepted: int, tokens: int, draft_seconds: float, target_seconds: float) -> None:
        """Count one pass over `proposed` + 1 tokens, of which it made `tokens`."""
        tested = min(accepted + 1, proposed)
        self.passes += 1
        self.tokens += tokens
        self.proposed += proposed
        self.tested += tested
        self.accepted += accepted
        self.seconds += draft_seconds + target_seconds
        self._recent = (_MEMORY * self._recent[0] + accepted, _MEMORY * self._recent[1] + tested)
        self._drafted += proposed
        self._draft_seconds += draft_seconds
        fastest = self._pass_seconds.get(proposed, target_seconds)
        # Near the fastest of them, since other programs' work is not the model's; slowly upwards, as the context grows.
        self._pass_seconds[proposed] = min(target_seconds, 1.02 * fastest)

    @property
    def acceptance(self) -> float:
        """α: of the proposals that were tested, the part that was accepted; NaN without any."""
        return self.accepted / self.tested if self.tested else float("nan")

    @property
    def tokens_per_pass(self) -> float:
        """Tokens over passes; NaN without any."""
        return self.tokens / self.passes if self.passes else float("nan")

    @property
    def draft_cost(self) -> float:
        """c: the seconds of a proposal over those of the target's pass over one token."""
        return self._draft_seconds / self._drafted / self._seconds_of(0) if self._drafted else 0.0

    def pass_cost(self, proposed: int) -> float:
        """What a pass over `proposed` + 1 tokens takes over one of a single token."""
        return self._seconds_of(proposed) / self._seconds_of(0)

    def next_proposed(self) -> int:
        """How many tokens to propose for the next pass."""
        if not self._pass_seconds:
            return 0  # Measures what a token takes without proposals.
        if len(self._pass_seconds) == 1:
            return _FIRST_PROPOSED
        accepted, tested = self._recent
        # Two proposals, one of them accepted, are what is believed before any: tried again when the past is forgotten.
        return best_proposed((accepted + 1) / (tested + 2), self.draft_cost, self.pass_cost)

    def __str__(self) -> str:
        if not self.passes:
            return "no pass could be saved: fewer than 2 tokens"
        found = f"{self.accepted:,} of {self.tested:,} tested proposals accepted ({self.proposed:,} proposed)"
        metered, gain = self.metered_improvement(), f"planned {self.planned_improvement():.2f} times as fast"
        if metered == metered:
            gain += f", metered {metered:.2f}"
        return f"{self.tokens_per_pass:.2f} tokens per pass of the model; {found}; {gain}"

    def planned_improvement(self) -> float:
        """What the formula gives for the metered α and seconds, with as many proposals as there were on average."""
        proposed = round(self.proposed / self.passes) if self.passes else 0
        return improvement(self.acceptance if self.tested else 0.0, proposed, self.draft_cost, self.pass_cost(proposed))

    def metered_improvement(self) -> float:
        """Tokens per second over those of passes of a single token; NaN where there was none."""
        if 0 not in self._pass_seconds or not self.seconds:
            return float("nan")
        return self.tokens * self._pass_seconds[0] / self.seconds

    def _seconds_of(self, proposed: int) -> float:
        """Seconds of a pass: as measured, or on the line between measured neighbours."""
        known = self._pass_seconds
        below = max((n for n in known if n <= proposed), default=None)
        above = min((n for n in known if n >= proposed), default=None)
        if below is None or above is None:
            # Beyond the measured ones a pass takes as long as the nearest, as where weights are read.
            nearest = above if below is None else below
            return 1.0 if nearest is None else known[nearest]
        if below == above:
            return known[below]
        part = (proposed - below) / (above - below)
        return (1 - part) * known[below] + part * known[above]
