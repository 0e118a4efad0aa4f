"""Documents with a task's questions are dropped, and no others."""

import json
import random
from pathlib import Path

import pytest

from napkin.curation import Dropped, Record
from napkin.curation.deduplication.stages import Decontaminate
from napkin.errors import NapkinError

WORDS = "river metal source winter market window paper letter garden number teacher island question bridge".split()


def test_documents_with_an_item_are_dropped_and_no_others(tmp_path: Path) -> None:
    draw = random.Random(10)
    questions = [" ".join(draw.choices(WORDS, k=20)) + "?" for _ in range(60)]
    paths = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for path, part in zip(paths, (questions[:30], questions[30:]), strict=True):
        rows = [{"id": f"q{n}", "prompt": text, "choices": ["yes", "no"], "answer": 0} for n, text in enumerate(part)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = Decontaminate(tasks=tuple(map(str, paths)))
    for number, question in enumerate(questions):
        text = " ".join(draw.choices(WORDS, k=300))
        clean = Record(f"clean#{number}", text)
        assert stage.apply(clean) is clean
        copied = stage.apply(Record(f"copy#{number}", f"{text}\n{question.upper().replace(' ', '  ')}\n{text}"))
        name = f"{'first' if number < 30 else 'second'}/q{number % 30}"
        assert copied == Dropped("contaminated", f"{name}: 1.00 of its windows")
    assert isinstance(stage.apply(Record("a#0", "\ud800" + questions[0])), Dropped)
    assert isinstance(stage.apply(Record("a#1", "")), Record)


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NapkinError, match="no task"):
        Decontaminate(tasks=())
    with pytest.raises(NapkinError, match="share"):
        Decontaminate(tasks=("a.jsonl",), share=0.0)
    with pytest.raises(NapkinError, match=r"none\.jsonl"):
        Decontaminate(tasks=(str(tmp_path / "none.jsonl"),)).apply(Record("a#0", "text"))
