import json

import pytest

from napkin.cli import main

TINY = "--model.vocab-size 64 --model.d-model 16 --model.n-heads 2 --model.n-layers 1 --model.context-length 8".split()


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_70b_parameters_on_15t_tokens_take_1024_h100_143_93_days(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--params", "70B", "--tokens", "15T", "--on", "1024xH100", "--mfu", "0.5"]
    assert "143.93 days" in output(capsys, *arguments)
    figures = json.loads(output(capsys, *arguments, "--json"))
    assert figures["flops"] == pytest.approx(6.3e24)
    assert figures["days"] == pytest.approx(143.92659381842682)
    assert figures["dollars"] == pytest.approx(figures["days"] * 24 * 1024 * 2.69)


def test_an_unknown_device_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "7B", "--tokens", "1T", "--on", "H1000"]) == 2
    assert "H100-SXM-80GB" in capsys.readouterr().err


@pytest.mark.parametrize("by", ["component", "operator", "module", "phase"])
def test_a_count_adds_up_however_it_is_summed(capsys: pytest.CaptureFixture[str], by: str) -> None:
    counted = json.loads(output(capsys, "count", *TINY, "--by", by, "--json"))
    for flops in ("flops", "elementwise_flops"):
        assert sum(row[flops] for row in counted["rows"].values()) == counted[flops] > 0
    assert sum(counted["peak_by_category"].values()) == counted["peak_bytes"]
    assert counted["unknown_operators"] == {}


def test_a_count_is_shown_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    shown = output(capsys, "count", *TINY, "--by", "phase")
    assert all(phase in shown for phase in ("forward", "backward", "optimizer"))
    counted = json.loads(output(capsys, "count", *TINY, "--json"))
    assert any(f"{counted['elementwise_flops']:,} elementwise" in line for line in shown.splitlines())


def test_a_count_by_component_or_module_says_what_the_flops_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("count", *TINY, "--model.attention", "plain", "--model.n-layers", "3")
    shown = output(capsys, *arguments, "--by", "component")
    assert all(part in shown for part in ("embedding", "scores", "feed-forward", "norms", "head", "loss", "optimizer"))
    assert "3 × blocks.*.attention" in " ".join(output(capsys, *arguments, "--by", "module").split())
    components = json.loads(output(capsys, *arguments, "--by", "component", "--json"))["rows"]
    assert components["attention scores"]["flops"] > 0
    phases = json.loads(output(capsys, *arguments, "--by", "phase", "--json"))["rows"]
    # The first layer's input is an embedding, which needs a gradient: the head's, which the loss forms early, too.
    assert phases["backward"]["flops"] == 2 * phases["forward"]["flops"]


def test_a_count_for_a_gpu_has_its_operators_and_what_it_reserves(capsys: pytest.CaptureFixture[str]) -> None:
    on_cpu, on_h100, on_t4 = (
        json.loads(output(capsys, "count", *TINY, "--json", *more))
        for more in ([], ["--target", "cuda", "--capability", "9.0"], ["--target", "cuda", "--capability", "7.5"])
    )
    assert on_cpu["reserved_bytes"] is None
    assert sum(on_h100["peak_by_category"].values()) == on_h100["peak_bytes"] <= on_h100["reserved_bytes"]
    assert "_scaled_dot_product_cudnn_attention" in on_h100["rows"]
    assert "_scaled_dot_product_efficient_attention" in on_t4["rows"]
    assert "reserved on the GPU" in output(capsys, "count", *TINY, "--target", "cuda", "--training.device", "cuda")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--target", "cuda", "--capability", "nine"], "use two numbers"),
        (["--capability", "9.0"], "--target cuda"),
        (["--target", "tpu"], "tpu"),
    ],
)
def test_a_target_that_cannot_be_is_refused_on_one_line(
    capsys: pytest.CaptureFixture[str], more: list[str], reason: str
) -> None:
    assert main(["count", *TINY, *more]) == 2
    complaint = capsys.readouterr().err
    assert reason in complaint
    assert complaint.count("\n") == 1


def test_a_preset_is_counted_and_options_change_it(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--model.n-layers", "2", "--model.context-length", "8", "--training.batch-size", "1"]
    counted = json.loads(output(capsys, "count", "--preset", "gpt2", *small, "--json"))
    again = json.loads(output(capsys, "count", *small, "--preset=gpt2", "--json"))
    # GPT-2 small has 124,439,808, of which ten blocks of 7,087,872 and 1016 positions are left out.
    assert counted["parameters"] == again["parameters"] == 124_439_808 - 10 * 7_087_872 - 1016 * 768


def test_an_unknown_preset_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["count", "--preset", "gpt-2"]) == 2
    assert "'gpt-2' is not a preset: did you mean 'gpt2'?" in capsys.readouterr().err


def test_formats_say_what_becomes_of_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert "65504" in output(capsys, "formats")
    rounded = json.loads(output(capsys, "formats", "1e-8", "--json"))
    assert rounded["fp16"]["underflow"]
    assert rounded["bf16"]["value"] != 0


def test_a_device_is_found_by_the_name_its_driver_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert "990 TFLOP/s" in output(capsys, "hardware", "NVIDIA H100 80GB HBM3")
    # 989.4 TFLOP/s by 3.35 TB/s.
    assert ", bf16 295," in output(capsys, "hardware", "H100")
    (device,) = json.loads(output(capsys, "hardware", "L4", "--json"))
    assert device["memory_bandwidth"] == 300e9


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["fit", "--on", "H10O"], "the closest names are H100"),
        (["fit", "--on", "T4", "--precision", "bf16"], "T4 does not support bf16 arithmetic"),
        (["fit", "--on", "8xH100", "--context-length", "0"], "--context-length is 0: use a number above 0"),
        (["fit", "--on", "H100", "--optimizer", "adamww"], "adamww"),
        (["plan", *TINY, "--on", "0xH100"], "is not a number of devices"),
        (["plan", *TINY, "--on", "7xH100", "--training.batch-size", "16"], "does not divide among 7 devices"),
        (["plan", *TINY, "--on", "T4", "--training.precision", "bf16"], "T4 does not support bf16 arithmetic"),
        (["plan", *TINY, "--on", "H100", "--watts", "nan"], "--watts is nan"),
        (["plan", *TINY, "--on", "H100", "--usd-per-hour", "-1"], "--usd-per-hour is -1"),
        (["plan", *TINY, "--on", "H100", "--mtbf-hours", "-1"], "--mtbf-hours is -1"),
        (["plan", *TINY, "--on", "H100", "--restart-minutes", "nan"], "--restart-minutes is nan"),
    ],
)
def test_devices_and_prices_that_cannot_be_are_refused_on_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    assert main(arguments) == 2
    complaint = capsys.readouterr().err
    assert reason in complaint
    assert complaint.count("\n") == 1


@pytest.mark.thorough
def test_a_plan_for_other_devices_says_what_it_costs_and_where_its_time_goes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["plan", *TINY, "--on", "2xA100-80GB", "--training.batch-size", "4"]
    plan = json.loads(output(capsys, *arguments, "--usd-per-hour", "3.6", "--json"))
    assert plan["device"]["name"] == "2 × A100-SXM-80GB"
    assert plan["dollars"] == pytest.approx(2 * plan["seconds"] / 1000)
    for by in ("operator", "module", "phase"):
        assert sum(plan[f"seconds_by_{by}"].values()) <= plan["seconds"] / plan["steps"] * (1 + 1e-9)
    shown = output(capsys, *arguments, "--by", "module", "--rules")
    assert all(word in shown for word in ("bandwidth-bound", "blocks.*.attention", "12·L·d·s·T", "dollars", "kWh"))


WEEKS = ["plan", *TINY, "--on", "8xA100-80GB", "--training.steps", "1000000000"]


def test_a_plan_of_weeks_has_failures_and_the_best_checkpoint_interval(capsys: pytest.CaptureFixture[str]) -> None:
    shown = output(capsys, *WEEKS, "--mtbf-hours", "5", "--training.checkpoint-every", "100000000")
    assert "best checkpoint interval: " in shown
    assert "with failures: goodput " in shown
    assert "training.checkpoint_every is too long" in shown


@pytest.mark.torture
def test_the_best_checkpoint_interval_is_not_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert "one in 263.9 days (the rate of Llama 3: 419 in 54 days on 16,384 H100)" in output(capsys, *WEEKS)
    failures = json.loads(output(capsys, *WEEKS, "--mtbf-hours", "5", "--json"))["failures"]
    assert failures["mtbf_seconds"] == 5 * 3600
    best = str(failures["best_interval_steps"])
    shown = output(capsys, *WEEKS, "--mtbf-hours", "5", "--training.checkpoint-every", best)
    assert f"best checkpoint interval: {int(best):,} steps" in shown
    assert "is too" not in shown
    assert "failures: fewer than 0.01 expected" in output(capsys, "plan", *TINY, "--on", "8xA100-80GB")
    alone = ["plan", *TINY, "--on", "A100-80GB"]
    assert "failures" not in output(capsys, *alone)
    assert "(given)" in output(capsys, *alone, "--mtbf-hours", "1")
