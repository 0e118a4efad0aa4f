"""Choosing the form of an operator by timing it on this machine, once for each class of shapes.

The forms are called in turns, and each call is compared with the default's of the same turn: what slows the machine
down for a while is in both. Beside other processes a call counts the processor time of its busiest thread, see
competition.py. Another form than the default is chosen only if it is surely faster: where two tie, the default stays.
"""

import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

from napkin.errors import NapkinError
from napkin.hardware.competition import Sampler
from napkin.hardware.sampling import Clock, Interval, Sampling, Timed, ratio_interval, sample_in_turns
from napkin.kernels.operator_forms import Choice, ShapeClass, are_measured, keep_choices, known_form

GAIN = 0.02
"""The part of the default's seconds that another form has to save to be chosen."""
FIRST_ROUNDS = 2
HOPELESS = 1.15
"""A form that takes so many times as long as the fastest one in the first rounds is not timed further."""
MOST_SECONDS = 20.0
"""Where timing all forms would take longer than this, as on a processor that emulates a format, the default is
chosen."""
CALLS = 12
"""Calls of a form that is timed to the end, with those that warm up."""
SURE = 0.75
"""The probability with which the interval of a form's ratio has to contain the true one: of six ratios, all but the
largest are then below 1."""
MOST_REPEATS = 3
"""How often more samples are taken while it is undecided whether a form is faster, as on a busy machine."""
SECONDS = 0.1
"""Seconds of timing each form, unless it is said otherwise; six calls at least, so that the median has an interval."""

Forms = Mapping[str, Callable[[], object]]
"""A call for each form of an operator, on operands of one shape."""


def choose_form(
    operator: str,
    shape_class: ShapeClass,
    make_forms: Callable[[], Forms],
    *,
    default: str,
    seconds: float = SECONDS,
    sampler: Sampler | None = None,
) -> str:
    """The form in which this machine computes a class of shapes; if it is not known yet, it is found by timing and
    kept.

    `make_forms` is called only to time its forms, of which one is the default. With NAPKIN_FORMS=default nothing is
    timed: the result is the pinned form or the default. For several choices pass one `sampler`: a new one first watches
    the machine for a tenth of a second. Warns where a choice cannot be kept.
    """
    known = known_form(operator, shape_class)
    if known is not None or not are_measured():
        return known or default
    choice = time_forms(operator, shape_class, make_forms(), default=default, seconds=seconds, sampler=sampler)
    try:
        keep_choices([choice])
    except (OSError, NapkinError) as error:
        line = f"the fastest form of {operator} cannot be kept, each process times it again: {error}"
        warnings.warn(line, stacklevel=2)
    return choice.form


def time_forms(
    operator: str,
    shape_class: ShapeClass,
    forms: Forms,
    *,
    default: str,
    seconds: float = SECONDS,
    sampler: Sampler | None = None,
) -> Choice:
    """Time the forms of an operator in turns, each for about `seconds`, and choose one."""
    with Sampler() if sampler is None else nullcontext(sampler) as sampler:
        clock = undisturbed_clock(sampler)

        def in_turns(names: Sequence[str], sampling: Sampling) -> dict[str, list[float]]:
            return dict(
                zip(names, sample_in_turns([Timed(forms[each]) for each in names], clock, sampling), strict=True)
            )

        forms[default]()
        once = clock(forms[default], 1)
        if once * len(forms) * CALLS > MOST_SECONDS:
            return Choice(operator, shape_class, default, default, once, {default: 1.0})
        first = in_turns(list(forms), Sampling(seconds=0, least=FIRST_ROUNDS))
        quickest = {name: min(samples) for name, samples in first.items()}
        fastest = min(quickest.values())
        left = [name for name in forms if name == default or quickest[name] <= HOPELESS * fastest]
        samples = in_turns(left, Sampling(seconds=seconds)) if len(left) > 1 else first
        repeats = min(MOST_REPEATS, int(MOST_SECONDS / (once * len(left) * CALLS)))
        for _ in range(repeats):
            if not is_open(samples, default):
                break
            more = in_turns(left, Sampling(seconds=seconds))
            samples = {name: [*samples[name], *more[name]] for name in left}
        conditions = sampler.conditions()
    form, ratios = fastest_of(samples, default)
    return Choice(
        operator=operator,
        shape_class=shape_class,
        form=form,
        default=default,
        default_seconds=statistics.median(samples[default]),
        ratios={name: ratios.get(name, each / quickest[default]) for name, each in quickest.items()},
        disturbed=conditions is not None and conditions.busy,
    )


def undisturbed_clock(sampler: Sampler) -> Clock:
    """The clock that forms are compared by: beside other processes the processor time of the busiest thread."""

    def clock(call: Callable[[], object], calls: int) -> float:
        sample = sampler.sample(call, calls)
        return sample.processor if sampler.busy else sample.clock

    return clock


def fastest_of(samples: Mapping[str, Sequence[float]], default: str) -> tuple[str, dict[str, float]]:
    """The form to choose of those that were timed in turns, and the medians of their seconds over the default's."""
    ratios = _ratios(samples, default)
    faster = {name: each.median for name, each in ratios.items() if each.high < 1 and each.median < 1 - GAIN}
    return min(faster, key=faster.__getitem__, default=default), {name: each.median for name, each in ratios.items()}


def is_open(samples: Mapping[str, Sequence[float]], default: str) -> bool:
    """True if a form seems to be faster than the default and that is not sure yet."""
    return any(each.median < 1 - GAIN and each.high >= 1 for each in _ratios(samples, default).values())


def _ratios(samples: Mapping[str, Sequence[float]], default: str) -> dict[str, Interval]:
    return {name: ratio_interval(own, samples[default], SURE) for name, own in samples.items()}
