import json
from typing import Any

import pytest

import napkin
from napkin.cli import main
from napkin.model.config import preset

SERVE = ["plan", "--serve", "--preset", "llama-3-8b", "--concurrency", "64"]


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*SERVE, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_service_is_planned_for_each_degree_that_divides_the_devices(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, "--on", "8xH100")
    assert [(each["tensor"], each["replicas"]) for each in found["degrees"]] == [(1, 8), (2, 4), (4, 2), (8, 1)]
    for degree in found["degrees"]:
        times, interval = degree["times"], degree["interval"]
        # Little's law: as many requests are in flight as arrive while one is served.
        seconds = times["time_to_first_token"] + 255 * times["time_per_output_token"]
        assert degree["tokens_per_second"] == pytest.approx(64 * 256 / seconds)
        assert degree["usd_per_million_tokens"] == pytest.approx(
            8 * found["usd_per_hour"] / 3600 / degree["tokens_per_second"] * 1e6
        )
        slow, fast = degree["tokens_per_second_interval"]
        assert slow < degree["tokens_per_second"] < fast
        assert interval["tpot"] > 1
        assert degree["weight_bytes"] == pytest.approx(2 * 8_030_261_248 / degree["tensor"])
    assert found["prefill_intensity"] > found["ridge"] > max(each["decode_intensity"] for each in found["degrees"])


def test_the_plan_prints_rule_and_count_and_both_times_with_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SERVE, "--on", "2xH200", "--weights", "fp8", "--usd-per-hour", "2"]) == 0
    printed = capsys.readouterr().out
    for text in ("rule", "count", "KV of a sequence", "TTFT", "TPOT", "nine in ten", "$/M tokens", "ridge", " to "):
        assert text in printed
    assert "was not measured" not in printed
    assert main([*SERVE, "--on", "A100", "--output-tokens", "9000"]) == 0
    told = capsys.readouterr()
    assert "was not measured on such a device" in told.out
    assert "the model's context of 8,192" in told.err


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--concurrency", "0"], "concurrency is 0: use a number from 1"),
        (["--input-tokens", "8000"], "more than the model's context of 8,192"),
        (["--model.d-model", "65536"], "this machine has"),
        (["--on", "H100", "--concurrency", "0"], "concurrency is 0"),
        (["--on", "H100", "--input-tokens", "-3"], "input_tokens is -3"),
        (["--on", "H100", "--tensor", "3"], "tensor is 3"),
        (["--on", "H100", "--usd-per-hour", "nan"], "usd_per_hour is nan"),
        (["--on", "H100", "--requests-per-client", "0"], "requests_per_client is 0"),
        (["--on", "A100", "--weights", "nvfp4"], "does not support fp4"),
        (["--on", "H100", "--server", "llama"], "vllm, trtllm, sglang"),
        (["--on", "H100", "--kv", "int8"], "kv is int8, with which vllm was not measured"),
        (["--kv", "fp8"], "kv is fp8, which napkin's own engine does not have"),
        (["--weights", "fp8"], "weights is fp8, which napkin's own engine does not have"),
        (["--tensor", "2"], "tensor is 2, which napkin's own engine does not have"),
        (["--on", "T4"], "does not fit"),
        (["--on", "H100", "--model.vocab-size", "0"], "vocab_size is 0"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    assert main([*SERVE, *arguments]) == 2
    told = capsys.readouterr().err
    assert error in told
    assert "Traceback" not in told


def test_this_machine_serves_a_small_model_with_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--model.vocab-size", "300", "--model.d-model", "32", "--model.n-layers", "1", "--model.n-heads", "2"]
    load = ["--model.context-length", "64", "--concurrency", "2", "--input-tokens", "16", "--output-tokens", "4"]
    assert main(["plan", "--serve", *small, *load]) == 0
    printed = capsys.readouterr().out
    for text in (
        "napkin's own engine on this machine",
        "2 running at a time",
        "time per output token",
        "weights",
        "rule",
        "TTFT",
    ):
        assert text in printed
    assert main(["plan", "--serve", *small, *load, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (here,) = told["degrees"]
    assert told["device"] == "this machine"
    assert here["kv_bytes_per_sequence"] == 2 * 32 * 2 * 20
    assert here["time_per_output_token"]["50"] > 0
    on_devices = figures(capsys, "--on", "H100")
    # One form.
    assert told.keys() == on_devices.keys()
    assert here.keys() == on_devices["degrees"][0].keys()
    assert here["times"].keys() == on_devices["degrees"][0]["times"].keys()


def test_degrees_that_the_weights_do_not_fit_into_are_named_beside_those_that_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--serve", "--preset", "llama-3-70b", "--on", "4xH100"]) == 0
    printed = capsys.readouterr().out
    assert "tensor 1: H100-SXM-80GB: a sequence of 1,280 tokens does not fit beside the weights" in printed
    assert "tensor 4: " not in printed


def test_a_window_bounds_the_counted_cache_and_not_the_rule(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--model.vocab-size", "1000", "--model.n-layers", "4", "--model.context-length", "4096"]
    assert main(["plan", "--serve", *sizes, "--model.attention-window", "128", "--on", "L4"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "KV of a sequence" in line]
    # 1,280 tokens of 4 layers of 4 heads of 64 numbers, keys and values, in bf16; 128 of them in the window.
    assert line.split()[4:8] == ["5.24", "MB", "524", "kB"]


def test_a_cache_that_is_too_small_makes_requests_wait(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--on", "H100", "--concurrency", "2000", "--input-tokens", "4000"]
    degree = figures(capsys, *arguments)["degrees"][0]
    assert degree["times"]["running"] < 2000
    assert degree["times"]["waiting"] > 0
    assert main([*SERVE, *arguments]) == 0
    assert "the others wait" in capsys.readouterr().out


def test_from_python_the_plan_is_an_object_that_prints_itself() -> None:
    plan = napkin.plan_service(
        preset("llama-3-8b"), "2xB200", concurrency=8, input_tokens=500, output_tokens=50, weights="fp8", tensor=2
    )
    (degree,) = plan.degrees
    assert plan.best is degree
    assert degree.interval is not None
    assert degree.interval.measured
    assert "TTFT" in repr(plan)


def test_the_command_prints_what_a_draft_takes_and_gains(capsys: pytest.CaptureFixture[str]) -> None:
    how = ("--on", "H100", "--draft", "llama-3.2-1b", "--acceptance", "0.7")
    said = figures(capsys, *how)["draft"]
    assert said["tokens_per_pass"] == pytest.approx((1 - 0.7**5) / 0.3)
    assert main([*SERVE, *how]) == 0
    printed = capsys.readouterr().out
    assert "weights of the draft" in printed
    assert f"decoding is {said['improvement']:.2f} times as fast" in " ".join(printed.split())
    assert main([*SERVE, "--on", "H100", "--draft", "none-such", "--acceptance", "0.7"]) == 2
    assert "none-such" in capsys.readouterr().err
