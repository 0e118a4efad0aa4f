"""Figures that a text states, beside figures that are computed here by hand."""

import json
import random
from pathlib import Path

import pytest

from napkin.cli import main
from napkin.planning.statements import check_statements

RIGHT = [
    "Training a 70B parameter model on 15T tokens takes $6.3 \\times 10^{24}$ FLOPs.",
    "It costs 84 ZFLOPs with 7 billion parameters on 2 trillion tokens.",
    # 6 · 70e9 · 15e12 / (1,024 · 989.4e12 · 0.5) seconds are 143.9 days.
    "A 70B model on 15T tokens on 1024 H100s at 50% MFU takes 144 days.",
    "A 70B model on 15T tokens on 1024 H100s with an MFU of 0.5 takes about 150 days.",
    "The weights of a 70B model in **bf16** take 140 GB.",
    # 8.03 · 2 / 1.024^3
    "A model with 8.03B parameters in half precision needs 14.96 GB.",
    "An A100 does 312 TFLOP/s in bf16.",
    "The H100's peak with 2:4 sparsity is 1979 TFLOP/s in bf16.",
    "An H100 has 80 GB of memory at a bandwidth of 3.35 TB/s.",
    "fp16 has 5 exponent bits and 10 mantissa bits; its largest number is 65504.",
    "The smallest normal number of fp16 is 6.1e-5.",
    "float32 takes 4 bytes per number.",
    "GPT-2 XL has 1.56B parameters.",
    "So we get 8 × 80 = 640 in all, and 2^10 = 1024, or 1 - 1/8 = 0.875.",
    "With $6 \\cdot 10^3 \\times 7 = 42,000$ we are done.",
]
WRONG = [
    ("Training a 70B parameter model on 15T tokens takes 6.3e23 FLOPs.", "6.3e+24 FLOP", "6 · parameters"),
    ("A 70B model on 15T tokens on 1024 H100s at 50% MFU takes 72 days.", "143.9 days", "dense bf16"),
    ("A 70B model in fp32 needs 140 GB.", "280 GB", "4 bytes"),
    ("The H100 has a peak of 1979 TFLOP/s in bf16.", "990 TFLOP/s", "2:4 sparsity"),
    ("An H100 has a memory bandwidth of 2.04 TB/s.", "3.35 TB/s", "H100"),
    ("bfloat16 has 8 exponent bits and 8 mantissa bits.", "7", "mantissa bits of bf16"),
    ("The largest number of e4m3 is 240.", "448", "fp8-e4m3"),
    ("Llama-3-70B has 75B parameters.", "70.6 B", "llama-3-70b"),
    ("That is 3 * 4 = 13.", "12", "3 * 4"),
]
UNCLEAR = [
    "The weights of a 70B model in bf16 take 140 GB, in fp32 they take 280 GB.",
    "The run reached 400 TFLOP/s on an H100 in bf16.",
    "GPT-2 has 1.5B parameters.",
    "A 70B model takes 1.1 TB with Adam in fp32.",
    "An H100 with 13 GB of memory in use is nearly empty.",
]


@pytest.mark.parametrize("sentence", RIGHT)
def test_what_is_right_is_said_to_be(sentence: str) -> None:
    found = check_statements(sentence)
    assert found
    assert {each.verdict for each in found} == {"right"}


@pytest.mark.parametrize(("sentence", "computed", "by"), WRONG)
def test_what_is_wrong_is_said_with_what_it_should_be(sentence: str, computed: str, by: str) -> None:
    wrong = [each for each in check_statements(sentence) if each.verdict == "wrong"]
    assert len(wrong) == 1
    assert computed in wrong[0].computed
    assert by in wrong[0].by


@pytest.mark.parametrize("sentence", UNCLEAR)
def test_what_is_not_understood_is_no_mistake(sentence: str) -> None:
    assert [each.verdict for each in check_statements(sentence)] == ["not understood"]


def test_a_figure_may_be_rounded_to_its_last_digit_and_no_further() -> None:
    draw = random.Random(0)
    for _ in range(300):
        parameters, tokens, digits = draw.randint(1, 999), draw.randint(1, 99), draw.randint(2, 5)
        flops = 6 * parameters * 1e9 * tokens * 1e12
        sentence = f"{parameters}B parameters on {tokens}T tokens are {{}} FLOPs."
        (right,) = check_statements(sentence.format(f"{flops:.{digits - 1}e}"))
        assert right.verdict == "right"
        off = flops * (1 + draw.choice([-1, 1]) * 1.6 * 10.0 ** (1 - digits))
        (wrong,) = check_statements(sentence.format(f"{off:.{digits - 1}e}"))
        assert wrong.verdict == "wrong"


def test_lines_are_those_of_the_text_and_code_is_left_out() -> None:
    text = "# Notes\n\nOne line\nand 2 * 3 = 7 in the next. Then\n2 * 2 = 5.\n"
    text += "```\n6 * 7 = 43\n```\n- 1 + 1 = 3\n| 5 * 5 = 26 | x |\n"
    assert [(each.line, each.stated) for each in check_statements(text)] == [(3, "7"), (4, "5"), (9, "3"), (10, "26")]


@pytest.mark.parametrize(
    "text",
    [
        "9" * 5000,
        "1,000" * 2000,
        "2^" * 4000 + "2 = 3",
        "9^9^9^9^9 = 1",
        "(" * 1500 + "1 * 1 = 1",
        "1 / 0 * 1 = 5",
        "1e999999 * 2 = 4",
        "2 × 3 = " + "4" * 3000,
        "7B parameters " * 700,
        "\0 70B model\x1b[31m in bf16 2 GB",
    ],
)
def test_hostile_texts_end(text: str) -> None:
    assert all(each.verdict != "right" or each.stated for each in check_statements(text))


def test_the_command_fails_where_a_figure_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("We know that 2 * 3 = 6.\nBut 2 * 3 = 7, with 7 GB.\n")
    assert main(["notes", "check", str(notes)]) == 1
    assert "1 right, 1 wrong; 0 sentences not understood" in capsys.readouterr().out
    assert main(["notes", "check", str(notes), "--json"]) == 1
    assert [each["verdict"] for each in json.loads(capsys.readouterr().out)] == ["right", "wrong"]
    notes.write_text("We know that 2 * 3 = 6.\n")
    assert main(["notes", "check", str(notes)]) == 0
    notes.write_bytes(b"\xff")
    assert main(["notes", "check", str(notes)]) == 2
    assert "not UTF-8" in capsys.readouterr().err
