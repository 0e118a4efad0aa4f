import json
from pathlib import Path
from typing import Any

import pytest

from napkin.accounting.rules import decode_seconds_rule, kv_cache_bytes_rule
from napkin.cli import main
from napkin.planning.rules import RuleDevices, training_by_rule


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    return json.loads(output(capsys, "plan", *arguments, "--json"))


def test_a_mixture_of_experts_computes_with_its_active_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--params", "671B", "--tokens", "14.8T", "--on", "2048xH800"]
    dense = figures(capsys, *run)
    sparse = figures(capsys, *run, "--active-params", "37B")
    assert dense["days"] == pytest.approx(680.6, abs=0.1)
    assert sparse["flops"] == 6 * 37 * 10**9 * 148 * 10**11
    assert sparse["days"] == pytest.approx(dense["days"] * 37 / 671)
    # All of them have weights, gradients and moments.
    assert sparse["state_bytes"] == dense["state_bytes"] == 16 * 671e9
    assert "--active-params" in output(capsys, "plan", *run)
    assert "--active-params" not in output(capsys, "plan", *run, "--active-params", "37B")
    assert "--active-params" not in output(capsys, "plan", "--params", "7B", "--tokens", "1T", "--on", "H800")


def test_a_device_without_bf16_is_planned_in_fp16_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--params", "1B", "--tokens", "20B", "--on", "V100"]
    assert figures(capsys, *run)["format"] == "fp16"
    assert "the catalogue has no bf16 for V100-SXM2-16GB" in output(capsys, "plan", *run)
    assert figures(capsys, *run)["seconds"] == pytest.approx(6 * 1e9 * 20e9 / (0.5 * 125e12))
    assert figures(capsys, *run, "--format", "fp32")["seconds"] == pytest.approx(6 * 1e9 * 20e9 / (0.5 * 15.7e12))
    assert main(["plan", *run, "--format", "bf16"]) == 2
    assert "does not support bf16" in capsys.readouterr().err
    assert "no bf16" not in output(capsys, "plan", "--params", "1B", "--tokens", "20B", "--on", "H100")


def test_a_week_has_so_many_flops_and_a_compute_optimal_model(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--on", "8xH100", "--within", "1week"]
    found = figures(capsys, *run)
    assert found["flops"] == pytest.approx(8 * 989.5e12 * 0.5 * 7 * 86400)
    assert found["tokens"] == pytest.approx(20 * found["parameters"])
    assert 6 * found["parameters"] * found["tokens"] == pytest.approx(found["flops"])
    assert found["dollars"] == pytest.approx(8 * 7 * 24 * 2.69)
    given = figures(capsys, *run, "--params", "1B", "--mfu", "0.4")
    assert 6 * 1e9 * given["tokens"] == pytest.approx(0.8 * found["flops"])
    given = figures(capsys, *run, "--tokens", "1T")
    assert 6 * 1e12 * given["parameters"] == pytest.approx(found["flops"])
    assert "compute-optimal" in output(capsys, "plan", *run)


def test_the_mfu_follows_from_three_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--params", "7B", "--tokens-per-second", "90k", "--on", "8xH100"]
    found = figures(capsys, *run)
    assert found["mfu"] == pytest.approx(6 * 7e9 * 90e3 / (8 * 989.5e12))
    assert "= 47.8%" in output(capsys, "plan", *run)
    assert figures(capsys, *run, "--tokens", "900M")["seconds"] == pytest.approx(1e4)
    fast = output(capsys, "plan", "--params", "7B", "--tokens-per-second", "900k", "--on", "8xH100")
    assert "which is impossible" in fast


def test_parameters_alone_give_flops_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, "--params", "70B")
    assert (found["tokens"], found["flops"], found["state_bytes"]) == (1.4e12, 588 * 10**21, 112 * 10**10)
    assert "--on 8xH100" in output(capsys, "plan", "--params", "70B")


def test_the_batch_size_is_that_of_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--n-layers 80 --d-model 8192 --n-heads 64 --n-kv-heads 8 --context-length 8192 --vocab-size 128256".split()
    run = ["--params", "70B", "--on", "8xH100", "--rules", *sizes, "--d-ff", "28672"]
    cache = kv_cache_bytes_rule(n_layers=80, n_kv_heads=8, head_dim=128, context_length=8192)
    for batch_size in (1, 32):
        rules = {
            row["quantity"]: row["rule"] for row in figures(capsys, *run, "--batch-size", str(batch_size))["rules"]
        }
        step = decode_seconds_rule(140e9, cache, 3.35e12, batch_size=batch_size)
        assert rules["latency of a token"] == pytest.approx(step)
        assert rules["throughput"] == pytest.approx(batch_size / step)
        assert rules["FLOPs, training"] == 6 * 70e9 * 8192 * batch_size
        assert rules["KV cache of a sequence"] == cache
    assert len(rules) == 21
    shown = output(capsys, "plan", *run)
    assert all(quantity.split()[0] in shown for quantity in rules)
    fewer = output(capsys, "plan", "--params", "70B", "--rules")
    assert "--n-layers, --d-model, --n-heads, --vocab-size would add rules" in fewer


def test_a_device_of_ones_own_is_planned_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\npeaks = { bf16 = 100e12 }\nmemory_bytes = 24e9\nmemory_bandwidth = 1e12\n'
        'price = { usd_per_hour = 0.5, date = "2026-01", offer = "my shelf" }\n'
    )
    found = figures(capsys, "--params", "1B", "--tokens", "20B", "--on", f"8x{path}")
    assert found["device"] == "mine"
    assert found["seconds"] == pytest.approx(6 * 1e9 * 20e9 / (0.5 * 8 * 100e12))
    shown = output(capsys, "plan", "--params", "1B", "--tokens", "20B", "--on", f"8x{path}")
    assert "at $0.50 per hour, my shelf, 2026-01" in shown
    assert json.loads(output(capsys, "hardware", str(path), "--json"))[0]["name"] == "mine"
    assert "my shelf" in output(capsys, "hardware", str(path))


def test_the_llama_3_run_has_failures_and_goodput_as_published(capsys: pytest.CaptureFixture[str]) -> None:
    # 54 days at 41% (The Llama 3 Herd of Models, table 4): 419 interruptions, more than 90% effective.
    run = ["--params", "405B", "--tokens", "12.3T", "--on", "16384xH100", "--mfu", "0.41"]
    found = figures(capsys, *run)
    assert found["days"] == pytest.approx(52, abs=1)
    failures = found["failures"]
    assert failures["interruptions"] == pytest.approx(419, rel=0.05)
    assert failures["mtbf_seconds"] / 3600 == pytest.approx(3.1, abs=0.05)
    assert 0.9 < failures["goodput"] < 1
    assert failures["seconds"] == pytest.approx(found["seconds"] / failures["goodput"])
    assert failures["dollars"] == pytest.approx(found["dollars"] / failures["goodput"])
    assert failures["interval_seconds"] == failures["best_interval_seconds"]
    (line,) = [line for line in output(capsys, "plan", *run).splitlines() if line.startswith("failures")]
    assert "one in 3 h 06 min" in line
    assert "419 in 54 days on 16,384 H100" in line


def test_failures_are_said_of_several_devices_and_of_long_runs(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--params", "1M", "--tokens", "20M", "--on"]
    long = ["--params", "7B", "--tokens", "1T", "--on", "H100"]
    assert "\nfailures" not in output(capsys, "plan", *tiny, "H100")
    assert "\nfailures" in output(capsys, "plan", *tiny, "8xH100")
    assert "one in 2111.5 days (the rate of Llama 3" in output(capsys, "plan", *long)
    given = figures(capsys, *long, "--mtbf-hours", "20", "--restart-minutes", "0")["failures"]
    assert (given["mtbf_seconds"], given["restart_seconds"]) == (72_000, 0)
    assert "(given)" in output(capsys, "plan", *long, "--mtbf-hours", "20")
    # It is interrupted before it has restarted.
    assert "would not end" in output(capsys, "plan", *long, "--mtbf-hours", "1e-6")
    assert figures(capsys, *long, "--mtbf-hours", "1e-6")["failures"]["seconds"] is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--within 1week", "--within needs devices"),
        ("--active-params 3B", "are a part of --params"),
        ("--params 1B --active-params 2B", "is more than --params"),
        ("--within 0days --on H100", "use a time above 0"),
        ("--within soon --on H100", "is not a duration"),
        ("--tokens-per-second 5 --on H100", "needs a model and devices"),
        ("--params 1B --tokens-per-second 5", "needs a model and devices"),
        ("--params 1B --tokens-per-second 5 --on H100 --mfu 0.5", "--mfu is what"),
        ("--params 1B --tokens-per-second 5 --on H100 --within 1day", "two questions"),
        ("--params 1B --within 1week --tokens 1B --on H100", "leaves nothing to find"),
        ("--params 1B --mfu 2", "use a fraction above 0"),
        ("--params 0", "use a number above 0"),
        ("--params 1B --rules --batch-size 0", "--batch-size is 0"),
        ("--params 1B --rules --d-model 10 --n-heads 3", "does not divide"),
        ("--params 1B --on nosuch.toml", "does not exist"),
        ("--params 1B --on H100 --mtbf-hours 0", "--mtbf-hours is 0"),
        ("--params 1B --on H100 --mtbf-hours nan", "--mtbf-hours is nan"),
        ("--params 1B --on H100 --restart-minutes -1", "--restart-minutes is -1"),
        ("--params 1B --on H100 --restart-minutes inf", "--restart-minutes is inf"),
        ("--params 1B --mtbf-hours 3", "give --params, --tokens and --on"),
        ("--params 1B --on H100 --format fp3", "is not a number format"),
    ],
)
def test_a_question_without_an_answer_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: str, reason: str
) -> None:
    assert main(["plan", *arguments.split()]) == 2
    refusal = capsys.readouterr().err
    assert reason in refusal
    assert refusal.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--params 7B --preset gpt2", "'--preset' does not go with --params, which is `napkin plan rule`"),
        ("recipe.toml --params 7B", "'recipe.toml' does not go with --params, which is `napkin plan rule`"),
        ("--serve --preset gpt2 --layout auto", "'--layout' does not go with --serve, which is `napkin plan service`"),
        ("--preset gpt2 --concurrency 3", "'--concurrency' is an option of `napkin plan service`"),
        ("rule --on H100", "there is nothing to plan: give --params 7B"),
    ],
)
def test_an_option_of_another_form_is_refused_with_its_name(
    capsys: pytest.CaptureFixture[str], arguments: str, line: str
) -> None:
    assert main(["plan", *arguments.split()]) == 2
    refusal = capsys.readouterr().err
    assert line in refusal
    assert refusal.count("\n") == 1


def test_a_form_is_named_or_chosen_by_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--params", "7B", "--tokens", "1T", "--on", "8xH100", "--json"]
    assert output(capsys, "plan", "rule", *run) == output(capsys, "plan", *run)


def test_a_plan_by_rule_in_python_has_the_figures_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    plan = training_by_rule(7 * 10**9, 10**12, devices=RuleDevices.of("8xH100"))
    found = figures(capsys, "--params", "7B", "--tokens", "1T", "--on", "8xH100")
    for name in ("device", "flops", "seconds", "dollars", "kilowatt_hours", "state_bytes"):
        assert plan.as_values()[name] == found[name]
    assert plan.figures["seconds"] == pytest.approx(6 * 7e9 * 1e12 / (0.5 * 8 * 989.5e12))
    title, *lines = repr(plan).splitlines()
    assert title.startswith("plan by rule: 8 × 990 TFLOP/s dense bf16")
    assert len(lines) == len(plan.lines)
