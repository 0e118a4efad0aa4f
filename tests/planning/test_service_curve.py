"""Curves of a service: each point is the plan of that load, and the knee is where Kleinrock's power is greatest."""

import dataclasses
import json
from typing import Any

import pytest

from napkin.cli import main
from napkin.errors import NapkinError
from napkin.model.config import preset
from napkin.planning.services.service_curve import ServiceCurve, ServicePoint, service_curves
from napkin.planning.services.service_planner import plan_service

LOAD: dict[str, Any] = {"input_tokens": 512, "output_tokens": 64}


def test_points_are_the_plans_of_their_loads() -> None:
    model = preset("llama-3-8b")
    found = service_curves(model, "2xH100", concurrencies=(16, 1, 16, 4), weights="fp8", **LOAD)
    assert [curve.tensor for curve in found.curves] == [1, 2]
    for curve in found.curves:
        assert [point.concurrency for point in curve.points] == [1, 4, 16]
        for point in curve.points:
            plan = plan_service(
                model, "2xH100", concurrency=point.concurrency, tensor=curve.tensor, weights="fp8", **LOAD
            )
            (degree,) = plan.degrees
            times = degree.times
            assert times is not None
            assert times == point.times
            assert degree.tokens_per_second == point.tokens_per_second
            # A request's own seconds: the first token, then the others.
            taken = times.time_to_first_token + (LOAD["output_tokens"] - 1) * times.time_per_output_token
            assert point.request_seconds == pytest.approx(taken)


def test_the_knee_of_a_closed_form_is_where_its_slope_says() -> None:
    """With c requests a step takes a + b·c seconds; c / (a + b·c)² is greatest where c is a / b."""
    model, a, b = preset("gpt2"), 0.016, 0.001
    found = service_curves(model, "H100", concurrencies=(1,), **LOAD)
    (point,) = found.curves[0].points

    def at(concurrency: int) -> ServicePoint:
        seconds = a + b * concurrency
        rate = concurrency / seconds
        return dataclasses.replace(point, concurrency=concurrency, tokens_per_second=rate, request_seconds=seconds)

    curve = ServiceCurve(1, tuple(at(2**power) for power in range(10)), None)
    assert curve.knee is not None
    assert curve.knee.concurrency == a / b
    assert ServiceCurve(1, (), "no room").knee is None


def test_limits_choose_the_point_of_most_tokens_among_those_that_hold_them() -> None:
    found = service_curves(preset("llama-3-8b"), "4xH100", **LOAD)
    points = [point for curve in found.curves for point in curve.points]
    limit = sorted(point.times.time_per_output_token for point in points)[len(points) // 2]
    best = found.best(tpot=limit)
    assert best is not None
    assert best.times.time_per_output_token <= limit
    within = [point for point in points if point.times.time_per_output_token <= limit]
    assert best.tokens_per_second == max(point.tokens_per_second for point in within)
    assert found.best(ttft=1e-9) is None


def test_a_degree_that_does_not_fit_says_why_and_has_no_points() -> None:
    found = service_curves(preset("llama-3-70b"), "4xH100", concurrencies=(1, 8), **LOAD)
    alone = found.curves[0]
    assert (alone.tensor, alone.points, alone.knee) == (1, (), None)
    assert "does not fit" in (alone.reason or "")
    assert found.curves[-1].points
    with pytest.raises(NapkinError, match="concurrencies is empty"):
        service_curves(preset("gpt2"), "H100", concurrencies=(), **LOAD)


def test_the_command_prints_the_curves(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "service", "--curve", "--preset", "gpt2", "--input-tokens", "16", "--output-tokens", "4"]
    assert main([*command, "--on", "H100"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("knee") == 2
    assert main([*command, "--on", "2xH100", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [curve["tensor"] for curve in values["curves"]] == [1, 2]
    for curve in values["curves"]:
        powers = {each["concurrency"]: each["tokens_per_second"] / each["request_seconds"] for each in curve["points"]}
        assert curve["knee"] == max(powers, key=powers.__getitem__)
    assert main(["plan", "service", "--curve", "--preset", "gpt2"]) == 2
    assert "--on" in capsys.readouterr().err
    assert main([*command, "--on", "2xH100", "--rate", "3"]) == 2
    assert "--rate" in capsys.readouterr().err
