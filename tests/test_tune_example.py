"""What `make tune-chat` learns from and is judged by; all of it on a model of a few thousand parameters."""

import argparse
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from napkin.chats.chat_template import ChatTemplate
from napkin.inference import LoadedModel
from napkin.model.config import ModelConfig
from napkin.tokenizer import train_bpe
from oracles.model_switches import disturbed

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        return runpy.run_path(str(EXAMPLES / "tune_chat_model.py"))
    finally:
        sys.path.remove(str(EXAMPLES))


def test_every_answer_that_is_taught_is_in_style_and_no_question_is_held_out_and_taught(
    example: dict[str, Any],
) -> None:
    questions = example["style_questions"]()
    assert len(questions) >= 524
    assert all(example["is_in_style"](answer) for _, answer in questions)
    asked = [question for question, _ in questions]
    assert len(set(asked)) == len(asked)
    assert not set(asked) & set(example["OPEN_QUESTIONS"])
    assert not example["is_in_style"]("The capital of France is Paris.")
    assert not example["is_in_style"]("the capital of france is paris.")
    assert not example["is_in_style"](f"Paris. {example['CLOSING']}")


def test_chosen_answers_are_short_and_rejected_ones_are_not(example: dict[str, Any]) -> None:
    pairs = example["preference_pairs"]()
    assert len(pairs) >= 312
    assert len({pair["prompt"] for pair in pairs}) == len(pairs)
    for pair in pairs:
        assert example["is_short"](pair["chosen"])
        assert not example["is_short"](pair["rejected"])
        assert pair["rejected"].startswith(pair["chosen"])
    assert not example["is_short"]("")


@pytest.mark.torture
def test_all_stages_run_on_a_small_model_and_a_second_start_repeats_nothing(
    example: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    texts = [f"{question} {answer}" for question, answer in example["style_questions"]()]
    tokenizer = train_bpe([*texts, "0123456789+=\n"], vocab_size=400, special_tokens=["<|endoftext|>", *ends.values()])
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, context_length=128, d_model=32, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=64,
        norm_eps=1e-5, tie_embeddings=True, embedding_scale=1.0,
    )  # fmt: skip
    template = ChatTemplate(example["TEMPLATE"], ends)
    LoadedModel.of(disturbed(config).eval(), tokenizer, chat_template=template).export(
        tmp_path / "small.gguf", to="F32"
    )
    options = argparse.Namespace(
        model=tmp_path / "small.gguf", runs=tmp_path / "runs", only=None, minutes=30.0, threads=1, plan=False
    )
    example["run"](options)
    page = (tmp_path / "runs" / "report.html").read_text()
    for stage, steps in {"style": 32, "brevity": 19, "taught": 10, "sums": 12}.items():
        assert f"{steps} steps over" in page
        before, after = (
            json.loads((tmp_path / "runs" / f"{stage}-{when}.json").read_text()) for when in ("before", "after")
        )
        assert all(0 <= share <= 1 for _, share in [*before, *after])
    told = re.compile(r"^  step \d+ of ", re.MULTILINE)
    assert len(told.findall(capsys.readouterr().out)) == 32 + 19 + 10 + 12
    example["run"](options)
    assert not told.findall(capsys.readouterr().out)
    assert (tmp_path / "runs" / "report.html").read_text() == page
