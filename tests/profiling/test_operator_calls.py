"""A step's time is divided among its calls: each nanosecond once."""

import doctest
import random

import torch  # noqa: F401  Its operators are known by their names.

from napkin.profiling import operator_calls
from napkin.profiling.operator_calls import (
    COMPILED,
    ENGINE,
    PYTHON,
    UNKNOWN_KERNELS,
    WAITING,
    HostEvent,
    Kernel,
    ProfiledStep,
    calls_of_step,
    kind_of,
)


def event(name: str, begin: int, end: int, number: int = 0) -> HostEvent:
    return HostEvent(name, "", begin, end, 1, number)


def step_of(*host: HostEvent, end: int = 100, kernels: tuple[Kernel, ...] = ()) -> ProfiledStep:
    return ProfiledStep(0, end, tuple(sorted(host, key=lambda each: (each.begin, -each.end))), kernels)


def test_the_examples_in_the_docstring_are_true() -> None:
    assert doctest.testmod(operator_calls).failed == 0


def test_an_operator_with_all_that_it_calls_is_one_call() -> None:
    found = calls_of_step(step_of(event("aten::mm", 10, 50), event("aten::copy_", 20, 30), event("aten::mm", 60, 70)))
    assert [(call.operator, call.nanoseconds) for call in found.calls] == [("mm", 40), ("mm", 10)]
    assert sum(gap.nanoseconds for gap in found.gaps) == 50


def test_what_torch_does_around_an_operator_counts_with_it() -> None:
    found = calls_of_step(
        step_of(
            event("autograd::engine::evaluate_function: MmBackward0", 10, 60),
            event("MmBackward0", 12, 55),
            event("aten::t", 14, 16),
            event("aten::mm", 20, 50),
        )
    )
    # 4 before the view, 4 between the two, 10 after the last.
    assert [(call.operator, call.nanoseconds) for call in found.calls] == [("t", 2 + 4), ("mm", 30 + 4 + 10)]
    assert [(gap.name, gap.nanoseconds) for gap in found.gaps] == [(PYTHON, 10), (PYTHON, 40)]


def test_python_inside_of_a_custom_function_is_no_operators() -> None:
    found = calls_of_step(step_of(event("MyFunction", 0, 100), event("aten::mm", 30, 40), event("aten::exp", 50, 60)))
    assert [call.nanoseconds for call in found.calls] == [10, 10]
    assert [(gap.name, gap.nanoseconds, gap.before) for gap in found.gaps] == [
        ("Python in MyFunction", 30, 0),
        ("Python in MyFunction", 10, 1),
        ("Python in MyFunction", 40, 1),
    ]


def test_a_node_without_an_operator_is_torch_between_calls() -> None:
    found = calls_of_step(step_of(event("aten::mm", 0, 90), event("autograd::engine::evaluate_function: X", 90, 100)))
    assert [(gap.name, gap.nanoseconds) for gap in found.gaps] == [(ENGINE, 10)]


def test_compiled_code_is_an_operator_beside_those_that_it_calls() -> None:
    found = calls_of_step(step_of(event("## Call CompiledFxGraph abc ##", 10, 90), event("aten::mm", 40, 60)))
    assert [(call.operator, call.nanoseconds, call.counts) for call in found.calls] == [
        (COMPILED, 30, True),
        ("mm", 20, True),
        (COMPILED, 30, False),
    ]


def test_operators_that_only_call_others_are_told_by_their_overload() -> None:
    # where(condition, tensor, tensor) computes; where(condition, tensor, number) makes a tensor and calls it.
    assert kind_of("aten::where", "self") == "call"
    assert kind_of("aten::where", "ScalarOther") == "torch"
    assert kind_of("aten::no_such_operator") == "Python"


def test_random_nests_are_divided_as_nanosecond_by_nanosecond() -> None:
    names = ["aten::mm", "aten::linear", "MyFunction", "autograd::engine::evaluate_function: A", "aten::exp"]
    kinds = dict(zip(names, ["call", "torch", "Python", "torch", "call"], strict=True))
    generator = random.Random(0)
    for _ in range(200):
        host: list[HostEvent] = []

        def nest(begin: int, end: int, depth: int, host: list[HostEvent] = host) -> None:
            at = begin
            while depth and at + 4 < end:
                start = generator.randint(at, end - 3)
                stop = generator.randint(start + 2, end)
                host.append(event(generator.choice(names), start, stop, len(host)))
                nest(start, stop, depth - 1)
                at = stop + 1

        nest(0, 60, 4)
        step = step_of(*host, end=60)
        found = calls_of_step(step)
        owned = {"call": 0, "torch": 0, "Python": 0}
        outermost: set[int] = set()
        for moment in range(60):
            around = [each for each in step.host if each.begin <= moment < each.end]
            call = next((each for each in around if kinds[each.name] == "call"), None)
            owned["call" if call else kinds[around[-1].name] if around else "Python"] += 1
            outermost |= {call.number} if call else set()
        assert len(found.calls) == len(outermost)
        assert sum(call.end - call.begin for call in found.calls) == owned["call"]
        assert sum(gap.nanoseconds for gap in found.gaps if gap.name.startswith("Python")) == owned["Python"]
        in_calls, in_gaps = (sum(each.nanoseconds for each in parts) for parts in (found.calls, found.gaps))
        assert in_calls + in_gaps == 60


def test_on_a_device_time_is_that_of_kernels_each_moment_once() -> None:
    host = (event("aten::linear", 0, 40, 5), event("aten::mm", 2, 20, 6), event("aten::exp", 22, 35, 7))
    kernels = (
        Kernel("gemm", 10, 40, 7, 6),
        Kernel("exp", 30, 60, 9, 7),
        Kernel("lost", 70, 75, 7, 99),
        Kernel("by the composite", 80, 90, 7, 5),
    )
    found = calls_of_step(step_of(*host, kernels=kernels))
    # What linear itself launches belongs to what it calls first.
    assert [(call.operator, call.nanoseconds) for call in found.calls] == [("mm", 30 + 10), ("exp", 20)]
    waits = [gap.nanoseconds for gap in found.gaps if gap.name == WAITING]
    assert waits == [10, 10, 5, 10]
    assert [gap.nanoseconds for gap in found.gaps if gap.name == UNKNOWN_KERNELS] == [5]
    assert [number for _, number in found.kernels] == [0, 1, None, 0]


def test_random_kernels_are_divided_as_nanosecond_by_nanosecond() -> None:
    generator = random.Random(1)
    for _ in range(200):
        host = tuple(event("aten::mm", 2 * number, 2 * number + 1, number + 1) for number in range(5))
        begins = sorted(generator.randint(0, 90) for _ in range(generator.randint(1, 8)))
        kernels = tuple(
            Kernel("k", begin, begin + generator.randint(1, 30), 7, generator.randint(1, 5)) for begin in begins
        )
        found = calls_of_step(step_of(*host, kernels=tuple(sorted(kernels, key=lambda k: (k.begin, -k.end)))))
        covered = sum(any(k.begin <= moment < k.end for k in kernels) for moment in range(100))
        assert sum(call.nanoseconds for call in found.calls) == covered
        assert sum(gap.nanoseconds for gap in found.gaps) == 100 - covered
