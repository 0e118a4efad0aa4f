"""The report of a run: one self-contained HTML file, made from the run folder alone.

While a process trains the run, the page is written about every half a minute, in at most half a percent of the time. A
process that is killed cannot say so: the page knows when it was written and when the next one is due, and a short
script compares that with the reader's clock.
"""

import contextlib
import itertools
import os
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from napkin.accounting.pricing import loop_overhead
from napkin.accounting.quantities import format_figure, format_ratio
from napkin.accounting.rank_seconds import planned_bytes, ranks_to_show
from napkin.errors import NapkinError
from napkin.files import StrPath, atomic_write_text, is_marked
from napkin.report.charts import constant_figures, curves_of, figure_curves, figure_rows, run_charts
from napkin.report.headline import bits_bars, key_figures, stacked_bar, status_of, warnings_of
from napkin.report.templates import UPLOT, UPLOT_STYLE, read_asset, render, scripts
from napkin.report.xy_picture import COLOURS, shade
from napkin.runs.accounting_files import Evaluation, PlanFile
from napkin.runs.metrics import StepMetrics
from napkin.runs.run_record import Answers, RunRecord, read_run_record
from napkin.units import format_bytes, format_flops, format_rate, format_seconds, format_share, format_three_digits

REFRESH_SECONDS = 30
# A process on a busy machine may be late without having been killed.
_TIMEOUT_FACTOR, _GRACE_SECONDS = 3, 60.0
_PAUSES = 200


class Liveness(NamedTuple):
    """The times that the template shows and compares."""

    written: str
    """Time of writing for people, in UTC."""
    written_iso: str
    every: str
    """The interval at which the page is written while the process trains."""
    due: int
    """Seconds after `written` when the next page is expected: after the interval or, if it ends before, with the
    run."""
    next: str
    """The same as text."""
    is_last: bool
    """True if the run is expected to end before another page of a run in training is due."""
    timeout: int
    """Seconds without a new page after which the process is presumed dead."""


def liveness(run: RunRecord, every: float, *, now: datetime | None = None) -> Liveness:
    """The liveness of a page that is written now, while the next one can be written in `every` seconds.

    The process writes it after the step that is being taken then, and also when the run ends.
    """
    now = (datetime.now(UTC) if now is None else now).replace(microsecond=0)
    steps = [logged.step_seconds for logged in run.metrics[-_PAUSES:] if logged.step_seconds > 0]
    due, is_last = every + (median(steps) if steps else 0.0), False
    if run.plan is not None and run.metrics and (last := run.metrics[-1]).step:
        to_the_end = last.seconds / last.step * max(0, run.plan.steps - last.step)
        due, is_last = min(due, to_the_end), to_the_end < due
    # The longest time between two of the last logged steps: a slow step, an evaluation, a checkpoint.
    ends = [0.0, *(logged.seconds for logged in run.metrics)][-_PAUSES - 1 :]
    longest = max((later - earlier for earlier, later in itertools.pairwise(ends)), default=0.0)
    return Liveness(
        written=now.strftime("%Y-%m-%d %H:%M:%S UTC"),
        written_iso=now.isoformat(),
        every=_readable(every),
        due=round(due),
        next=_readable(due),
        is_last=is_last,
        timeout=round(_TIMEOUT_FACTOR * (every + longest) + _GRACE_SECONDS),
    )


def _readable(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else format_seconds(seconds)


STEPS = 25
"""Logged steps that the balance is averaged over: a single batch is too noisy."""


class Balance(NamedTuple):
    """One layer with experts; loads are relative to a uniform load, which is 1."""

    layer: int
    """Counted from 1 among the layers that have experts."""
    n_experts: int
    busiest: float
    least_busy: float
    dropped: float
    """Fraction of the routed tokens that were dropped because their expert was full."""


def expert_balance(metrics: Sequence[StepMetrics]) -> list[Balance]:
    """The balance of each layer over the last `STEPS` logged steps; empty if the model has no experts."""
    logged = [step for step in metrics if step.expert_tokens is not None][-STEPS:]
    if not logged:
        return []
    layers = len(logged[-1].expert_tokens or [])
    shares = []
    for layer in range(layers):
        tokens = np.array([(step.expert_tokens or [])[layer] for step in logged], dtype=np.float64).sum(axis=0)
        dropped = sum((step.dropped_tokens or [0] * layers)[layer] for step in logged)
        uniform = tokens.mean() or 1.0
        shares.append(
            Balance(
                layer=layer + 1,
                n_experts=tokens.size,
                busiest=float(tokens.max() / uniform),
                least_busy=float(tokens.min() / uniform),
                dropped=float(dropped / (tokens.sum() or 1.0)),
            )
        )
    return shares


_GENERATOR = b'<meta name="generator" content="napkin report">'
# Marks a page from before pages named their generator.
_BRAND = '<p class="brand">napkin · run report</p>'.encode()
_SAMPLE_CHARACTERS = 20_000
_OPERATORS = 8
_ANSWERS = 24
_ANSWER_CHARACTERS = 500

REPORT_FILE = "report.html"


def write_report(
    run: StrPath, *, training: bool | None = None, every: Callable[[], float] = lambda: REFRESH_SECONDS
) -> Path:
    """Write report.html into a run folder, replacing an existing one, and return its path.

    `training` is whether a process is training the run; None is unknown. If one is, the page says so, when it was
    written and when the next one is due, and reloads itself then. `every` is called when everything else is ready, and
    returns the seconds until the next page can be written, once the current step has ended; long after that time, the
    page warns that the run was probably killed.

    The page makes no network requests: the data of its charts and the scripts that draw them are in it. Unless the run
    is in training, the same run gives the same bytes. Files that the run has not written yet are named as missing.
    Raises NapkinError for a malformed file or a folder that is not a run.
    """
    run = Path(run)
    page = run / REPORT_FILE
    text = render_report(read_run_record(run), training=training, every=every)
    _keep_foreign(page)
    atomic_write_text(page, text, overwrite=True)
    return page


def _keep_foreign(page: Path) -> None:
    """Rename a report.html that napkin did not write."""
    if not os.path.lexists(page) or is_marked(page, _GENERATOR) or is_marked(page, _BRAND):
        return
    names = (page.with_name(f"report-kept{suffix}.html") for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    aside = next(name for name in names if not os.path.lexists(name))
    page.rename(aside)
    warnings.warn(f"'{page}' was not written by napkin: it is now '{aside.name}'", stacklevel=3)


def render_report(
    run: RunRecord, *, training: bool | None = None, every: Callable[[], float] = lambda: REFRESH_SECONDS
) -> str:
    """The page as text; everything that the run wrote is escaped."""
    curves = curves_of(run.metrics)
    charts = run_charts(run, curves)
    experts = [
        {
            "layer": f"{balance.layer}, of {balance.n_experts} experts",
            "busiest": format_three_digits(balance.busiest),
            "least_busy": format_three_digits(balance.least_busy),
            "dropped": format_share(balance.dropped),
        }
        for balance in expert_balance(run.metrics)
    ]
    samples, left_out = run.samples or "", max(0, len(run.samples or "") - _SAMPLE_CHARACTERS)
    constants = [f"{name} {value:g}" for name, value in constant_figures(figure_curves(run.metrics))]
    further = [name for name in charts.by_name if name.startswith("figure-")] if charts else []
    place = f"<!-- {secrets.token_hex(16)} -->"
    used = [UPLOT, "format.js", "charts.js"] if charts else []
    page = render(
        "page.html",
        run=run,
        colours=COLOURS,
        status=status_of(run, training=training),
        refresh=REFRESH_SECONDS if training else None,
        warnings=warnings_of(run, training=training),
        keys=key_figures(run),
        sections=_sections(run, further=bool(further or constants), experts=bool(experts)),
        further=further,
        constants=constants,
        table=quantity_table(run),
        charts=charts,
        chart_style=read_asset(UPLOT_STYLE) if charts else None,
        figures=figure_rows(run.metrics, curves),
        bits=run.evaluation and {"bars": bits_bars(run.evaluation), "text": _evaluated(run.evaluation)},
        memory=_memory(run.plan),
        time=_time(run),
        operators=_operators(run.plan),
        ranks=_ranks(run),
        experts=experts,
        expert_steps=STEPS,
        samples=samples and {"text": samples[:_SAMPLE_CHARACTERS], "left_out": f"{left_out:,}" if left_out else ""},
        answers=_answers(run.answers),
        machine=_machine(run.plan),
        scripts=scripts(*used, *(["liveness.js"] if training else [])),
        liveness=Markup(place),
    )
    if training:
        # Last of all: when the next page can be written depends on the seconds that this one has taken.
        status = status_of(run, training=True)
        page = page.replace(place, render("liveness.html", status=status, liveness=liveness(run, every())), 1)
    return page


def _sections(run: RunRecord, *, further: bool, experts: bool) -> dict[str, str]:
    """The headings of the page by their anchors, in order."""
    measured = run.measurement
    metered = measured is not None and any(row.meter is not None for row in measured.table)
    is_timed = measured is not None and sum(measured.seconds.values()) > 0
    return {
        "quantities": "Planned and measured" if metered else "Planned",
        "loss": "Loss",
        "steps": "Learning rate and gradient norm",
        **({"further": "Figures of tuning"} if further else {}),
        **({"experts": "Expert balance"} if experts else {}),
        "bits": "Bits per byte",
        "memory": "Memory at the peak",
        "time": "Where the time went" if is_timed else "Where the time goes",
        **({"ranks": "Rank by rank"} if measured is not None and measured.ranks else {}),
        "figures": "The curves as figures",
        **({} if run.answers is None else {"answers": "Answers and their rewards"}),
        "samples": "Samples",
        "recipe": "Recipe",
        "machine": "Machine and versions",
    }


def quantity_table(run: RunRecord) -> dict[str, Any]:
    """The columns of a run's table and its rows, as a template shows them."""
    rows = run.measurement.table if run.measurement else run.plan.table if run.plan else ()
    metered = any(row.meter is not None for row in rows)
    columns = ["rule", "count", *(["meter", "meter/count"] if metered else [])]
    shown = []
    for row in rows:
        figures = [format_figure(value, row.unit) for value in (row.rule, row.count, row.meter)] + [format_ratio(row)]
        # A plan has only the first two columns.
        shown.append({"quantity": row.quantity, "note": row.note, "figures": list(zip(columns, figures, strict=False))})
    return {"columns": columns, "metered": metered, "rows": shown}


def _evaluated(found: Evaluation) -> str:
    perplexity = format_three_digits(found.perplexity)
    return f"{found.bytes:,} bytes as {found.tokens:,} tokens, perplexity {perplexity} per token."


def _memory(plan: PlanFile | None) -> dict[str, Any] | None:
    if plan is None or not (total := sum(plan.peak_by_category.values(), 0.0)):
        return None
    parts, device = plan.peak_by_category, plan.device
    share = format_share(total / device.memory_bytes) if device.memory_bytes else "–"
    verdict = "it fits" if plan.fits else "it does not fit"
    free = f"{format_bytes(device.memory_bytes)} free on {device.name}"
    text = f"{format_bytes(total)} at the peak, {free} ({share}): {verdict}."
    description = "Stacked bar of the peak memory; the table below lists its parts."
    return {
        "bar": stacked_bar(parts, description, limit=device.memory_bytes),
        "text": text,
        "total": format_bytes(total),
        "parts": [
            {"name": name, "colour": shade(name), "figure": format_bytes(size), "share": _part(size / total)}
            for name, size in parts.items()
        ],
    }


def _time(run: RunRecord) -> dict[str, Any]:
    seconds = run.measurement.seconds if run.measurement else {}
    flops = run.plan.flops_by_phase if run.plan else {}
    all_seconds, all_flops = sum(seconds.values(), 0.0), sum(flops.values(), 0.0)
    parts = [
        {
            "name": name,
            "colour": shade(name),
            "seconds": format_seconds(seconds[name]) if name in seconds else "–",
            "seconds_share": _part(seconds[name] / all_seconds) if name in seconds else "–",
            "flops": format_flops(flops[name]) if name in flops else "–",
            "flops_share": _part(flops[name] / all_flops) if name in flops else "–",
        }
        for name in {**seconds, **flops}
    ]
    description = "Stacked bar of the run's seconds; the table below lists its parts."
    added, span = loop_overhead(seconds), ""
    if run.measurement and run.metrics and run.measurement.steps < run.metrics[-1].step:
        span = f"Over the {run.measurement.steps:,} of {run.metrics[-1].step:,} steps that one process ran."
    return {
        "measured": all_seconds > 0,
        "span": span,
        "parts": parts,
        "seconds": format_seconds(all_seconds),
        "flops": format_flops(all_flops),
        "bar": stacked_bar(seconds, description),
        "overhead": added and f"{format_seconds(max(0.0, added[0]))}, {_part(max(0.0, added[1]))} of the steps",
    }


def _operators(plan: PlanFile | None) -> list[dict[str, Any]]:
    if plan is None or not (total := sum(plan.seconds_by_operator.values(), 0.0)):
        return []
    longest = sorted(plan.seconds_by_operator.items(), key=lambda entry: -entry[1])
    shown, rest = longest[:_OPERATORS], longest[_OPERATORS:]
    if rest:
        shown.append((f"{len(rest)} others", sum((seconds for _, seconds in rest), 0.0)))
    # A name may be wider than a phone, and should break after an underscore. join() escapes.
    return [
        {
            "name": Markup("_<wbr>").join(name.split("_")),
            "figure": format_seconds(seconds),
            "share": _part(seconds / total),
        }
        for name, seconds in shown
    ]


def _ranks(run: RunRecord) -> dict[str, Any] | None:
    measured = run.measurement
    if measured is None or not measured.ranks:
        return None
    shown, rows = ranks_to_show(measured.ranks, measured.straggler), []
    for each in shown:
        planned = planned_bytes(each.rank, len(measured.ranks), run.plan.pipeline_peak_bytes) if run.plan else None
        seconds = {
            name: format_seconds(getattr(each, f"{name}_seconds"))
            for name in ("compute", "exposed", "hidden", "bubble", "waiting")
        }
        planned_text = "" if planned is None else format_bytes(planned)
        rows.append({"rank": each.rank, "bytes": format_bytes(each.peak_bytes), "planned": planned_text, **seconds})
    return {"rows": rows, "others": len(measured.ranks) - len(shown), "straggler": measured.straggler}


def _answers(answers: Answers | None) -> dict[str, Any] | None:
    """Some answers of the last evaluation, those with the smallest rewards first: they say what is still wrong."""
    if answers is None:
        return None
    shown = sorted(answers.answered, key=lambda each: each.reward)[:_ANSWERS]
    rows = [
        {
            "task": "\n".join(each.content for each in answered.messages[:-1])[:_ANSWER_CHARACTERS],
            "answer": answered.messages[-1].content[:_ANSWER_CHARACTERS] if answered.messages else "",
            "reward": f"{answered.reward:g}",
            "tokens": f"{answered.tokens:,}",
            "ending": answered.failure or answered.ending,
        }
        for answered in shown
    ]
    return {"step": f"{answers.step:,}", "rows": rows, "all": f"{len(answers.answered):,}"}


def _machine(plan: PlanFile | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    device = plan.device
    peak = format_rate(device.matmul_peak)
    facts = [
        ("device", f"{device.name} ({device.kind})"),
        ("free memory", format_bytes(device.memory_bytes)),
        ("peak", f"{peak}, dense {device.format} matrix products, measured"),
        ("planned", plan.created.strftime("%Y-%m-%d %H:%M %Z").rstrip()),
        ("napkin", plan.napkin),
    ]
    return {"peak": peak, "facts": [*plan.formats.items(), *facts, *plan.versions.items()]}


def _part(share: float) -> str:
    # Parts of a whole are compared with one another, so all have the same number of decimals.
    return f"{share:.1%}" if share >= 0.001 or not share else "<0.1%"


MAX_TIME_FRACTION = 0.005
FIRST_GUESS_SECONDS = MAX_TIME_FRACTION * REFRESH_SECONDS
"""Assumed cost of the first page, so that it is written after half a minute."""
_MARGIN = 1.25


class LiveReport:
    """Call it after each step."""

    def __init__(
        self, run: Path, on_message: Callable[[str], None], *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._run = run
        self._on_message = on_message
        self._clock = clock
        self._begin = clock()
        self._due = self._promised = self._begin + REFRESH_SECONDS
        self._spent, self._expected, self._writing = 0.0, FIRST_GUESS_SECONDS, 0.0
        self._failed = False
        self.pages = 0
        """Pages written so far."""

    def __call__(self) -> None:
        """Write the page if it is due; a failure is reported once, and training continues without further pages."""
        now = self._clock()
        affordable = self._spent + self._expected <= MAX_TIME_FRACTION * (now - self._begin)
        if self._failed or not affordable or now < self._due:
            return
        try:
            write_report(self._run, training=True, every=lambda: self._next_page(now))
        except (NapkinError, OSError) as error:
            self._failed = True
            self._on_message(f"the report is not updated while the run trains: {error}")
            return
        self.pages += 1
        written = self._clock()
        self._writing = written - self._promised
        self._expected = written - now
        self._spent += self._expected

    def _next_page(self, begun: float) -> float:
        """Seconds until the next page, as the page that was begun at `begun` promises them; it is not written sooner.

        The cost of this page is not known before it is on the disk, and the promise has to be made in it: the seconds
        so far are taken with a margin, and writing is assumed to take as long as it did the last time.
        """
        self._promised = self._clock()
        cost = _MARGIN * (self._promised - begun) + self._writing
        affordable = (self._spent + 2 * cost) / MAX_TIME_FRACTION - (self._promised - self._begin)
        seconds = max(REFRESH_SECONDS, affordable)
        self._due = self._promised + seconds
        return seconds


@contextmanager
def live_report(run: Path, on_message: Callable[[str], None]) -> Iterator[LiveReport]:
    """Report a run while the block trains it; if that raises, a last page says that the run has stopped."""
    live = LiveReport(run, on_message)
    try:
        yield live
    except BaseException:
        if live.pages:
            with contextlib.suppress(NapkinError, OSError):
                write_report(run, training=False)
        raise
