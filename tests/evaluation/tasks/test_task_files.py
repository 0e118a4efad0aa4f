import json
from pathlib import Path
from typing import Any

import pytest

from napkin.errors import NapkinError
from napkin.evaluation.tasks.published import Item
from napkin.evaluation.tasks.task_file import read_task


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_mmlu_is_read_as_published(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "world_history_test.csv").write_text(
        'Who asked?,Ann,"Bob, the elder",Cid,Dee,B\n"Two\nlines",1,2,3,4,D\n'
    )
    (tmp_path / "test" / "anatomy_test.csv").write_text("Bones?,a,b,c,d,A\n")
    task = read_task([tmp_path / "test"])
    assert (task.name, task.kind, task.sections) == ("test", "choice", ["anatomy", "world_history"])
    assert task.items[1] == Item(
        "world_history/1",
        "Who asked?\nA. Ann\nB. Bob, the elder\nC. Cid\nD. Dee\nAnswer:",
        ("A", "B", "C", "D"),
        1,
        shown="B",
        section="world_history",
    )
    assert task.items[2].prompt.startswith("Two\nlines\nA. 1")
    assert task.items[2].right == 3


def test_blimp_gsm8k_hellaswag_and_arc_are_read_as_published(tmp_path: Path) -> None:
    pair = {"sentence_good": "Ann runs.", "sentence_bad": "Ann run.", "UID": "agreement", "pairID": "7", "field": "x"}
    (item,) = (task := read_task([jsonl(tmp_path / "blimp.jsonl", pair)])).items
    assert (task.kind, item.name, item.choices, item.right) == ("pair", "agreement/7", ("Ann runs.", "Ann run."), 0)

    reasoning = "16 - 3 = <<16-3=13>>13\n#### 1,300"
    (item,) = (task := read_task([jsonl(tmp_path / "g.jsonl", {"question": "Eggs?", "answer": reasoning})])).items
    assert (task.kind, item.prompt, item.answer, item.shown) == (
        "number", "Question: Eggs?\nAnswer:", "1,300", reasoning
    )  # fmt: skip

    wikihow = {
        "ind": 4, "activity_label": "Baking", "ctx_a": "[header] Mix [title] Then", "ctx_b": "the Cook",
        "ctx": "unused", "endings": ["eats [substeps] it", "sleeps", "runs", "sings"], "label": 2,
    }  # fmt: skip
    (item,) = (task := read_task([jsonl(tmp_path / "h.jsonl", wikihow)])).items
    assert (item.prompt, item.choices, item.right) == (
        "Baking: Mix. Then The cook", ("eats it", "sleeps", "runs", "sings"), 2
    )  # fmt: skip
    assert task.score == "acc_norm"

    choices = [{"text": "ice", "label": "1"}, {"text": "fire", "label": "2"}]
    published = {"id": "M_1", "question": {"stem": "Hot?", "choices": choices}, "answerKey": "2"}
    table = {"id": "M_1", "question": "Hot?", "choices": {"text": ["ice", "fire"], "label": ["1", "2"]}}
    for row in (published, table | {"answerKey": "2"}):
        (item,) = read_task([jsonl(tmp_path / "arc.jsonl", row)]).items
        assert item == Item("M_1", "Question: Hot?\nAnswer:", ("ice", "fire"), 1, shown="fire")


@pytest.mark.parametrize("answer", ["Paris", "B", 1, "1"])
def test_an_answer_is_named_by_text_letter_or_number(tmp_path: Path, answer: Any) -> None:
    row = {"prompt": "Capital?", "choices": ["Rome", "Paris"], "answer": answer, "id": "x", "group": "g"}
    assert read_task([jsonl(tmp_path / "t.jsonl", row)]).items[0] == Item(
        "x", "Capital?", ("Rome", "Paris"), 1, shown="Paris", group="g"
    )


def test_a_csv_with_headings_is_of_napkins_own_form(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("prompt,choice1,choice2,answer,section\nCapital?,Rome,Paris,Paris,France\n")
    task = read_task([tmp_path / "t.csv"])
    assert task.items[0] == Item("2", "Capital?", ("Rome", "Paris"), 1, shown="Paris", section="France")


def test_a_toml_file_says_how_rows_are_put(tmp_path: Path) -> None:
    jsonl(tmp_path / "rows.jsonl", {"q": "1 + 1 {x}", "a": "two", "b": "three", "key": "a", "answer": "B"})
    (tmp_path / "task.toml").write_text(
        'name = "sums"\nkind = "choice"\nitems = "rows.jsonl"\nprompt = "{q}\\nPick one."\nchoices = ["a", "b"]\n'
        'answer = "key"\nletters = true\nscore = "acc_bytes"\ndelimiter = ""\n'
    )
    with pytest.raises(NapkinError, match=r"line 1.*'a': name.*2"):
        read_task([tmp_path / "task.toml"])
    (tmp_path / "task.toml").write_text((tmp_path / "task.toml").read_text().replace('answer = "key"\n', ""))
    task = read_task([tmp_path / "task.toml"])
    assert (task.name, task.score, task.delimiter, set(task.files)) == (
        "sums", "acc_bytes", "", {f"{tmp_path.name}/rows.jsonl", f"{tmp_path.name}/task.toml"}
    )  # fmt: skip
    assert task.items[0].prompt == "1 + 1 {x}\nPick one.\nA. two\nB. three\nAnswer:"

    (tmp_path / "inline.toml").write_text(
        'kind = "number"\nmax_tokens = 9\nstop = ["\\n"]\n[[item]]\nprompt = "2 + 2 ="\nanswer = 4\n'
    )
    task = read_task([tmp_path / "inline.toml"])
    assert (task.kind, task.max_tokens, task.stop, task.items[0].answer) == ("number", 9, ("\n",), "4")


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": "?", "choices": ["a", "b", "a"], "answer": 0}, r"line 2: choices 1 and 3 are equal \('a'\)"),
        ({"prompt": "?", "choices": ["a", " "], "answer": 0}, "line 2: choice 2 is empty: a continuation needs text"),
        ({"prompt": "?", "choices": ["a"], "answer": 0}, "line 2: there is one choice"),
        ({"prompt": "?", "choices": ["a", "b"], "answer": 2}, "line 2: the answer is '2'"),
        ({"prompt": "?", "choices": ["a", "b"]}, "line 2: it has no 'answer': correct it"),
        ({"prompt": "?", "choices": ["a", 3], "answer": 0}, "line 2: 'choices' is not a list of texts"),
        ({"prompt": "?", "answer": "  "}, "line 2: it is of kind exact|line 2: the answer is empty"),
        ({"good": "a", "bad": "a"}, "line 2: choices 1 and 2 are equal"),
        ({"good": "a", "bad": "b"}, "line 2: it is of kind pair, the rows before are of kind choice"),
        ({"endings": ["a", "b"], "label": "", "ctx": "x"}, "line 2: invalid literal for int"),
        ({"question": "?", "choices": {"text": ["a", "b"], "label": ["A"]}, "answerKey": "A"}, "line 2: zip"),
        ({"question": "?", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "E"}, "the answer is 'E', the"),
        ([1, 2], "line 2 is not a JSON object"),
    ],
)
def test_a_bad_row_is_named_with_its_line_and_what_is_wrong(tmp_path: Path, row: Any, complaint: str) -> None:
    good = {"prompt": "?", "choices": ["x", "y"], "answer": 0}
    path = jsonl(tmp_path / "t.jsonl", good, row)
    with pytest.raises(NapkinError, match=complaint):
        read_task([path])
    if isinstance(row, dict):
        task = read_task([path], skip_bad=True)
        assert len(task.items) == len(task.left_out) == 1


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("t.jsonl", b"{", "line 1 is not JSON"),
        ("t.jsonl", b"\xff", "is not UTF-8 at byte 0"),
        ("t.jsonl", b"", "has no item"),
        ("t.csv", b"", "is empty"),
        ("t.csv", b'"a', "is not CSV"),
        ("t.csv", b"a,b,c,A\nd,e\n", "row 2 has 2 cells, the first 4"),
        ("t.csv", b"a,b,c,E\n", "line 1: the answer is 'E': use a letter from A to B"),
        ("t.toml", b"kind =", "is not a task"),
        ("t.toml", b"colour = 1", "is not a task .*unknown field `colour`"),
        ("t.toml", b"kind = 'choice'", "needs rows"),
        ("t.toml", b"kind = 'essay'\n[[item]]\nprompt = 'x'", "has kind 'essay': use one of choice"),
        ("t.txt", b"x", "is not a task file"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(NapkinError, match=complaint):
        read_task([tmp_path / name])


@pytest.mark.parametrize(
    ("kind", "right", "refused"), [("math", r"\frac{1}{2}", ""), ("number", "1,026 eggs", "x + 1"), ("exact", "x", "")]
)
def test_answers_that_a_model_writes_are_checked_as_references_of_rewards_are(
    tmp_path: Path, kind: str, right: str, refused: str
) -> None:
    (tmp_path / "task.toml").write_text(f'kind = "{kind}"\nitems = "rows.jsonl"\n')
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "?", "answer": right}) + "\n")
    task = read_task([tmp_path / "task.toml"])
    assert (task.kind, task.is_generated, task.items[0].answer) == (kind, True, right)
    rows.write_text(json.dumps({"prompt": "?", "answer": refused}) + "\n")
    with pytest.raises(NapkinError, match="1"):
        read_task([tmp_path / "task.toml"])


def test_two_items_of_one_name_are_refused(tmp_path: Path) -> None:
    row = {"prompt": "?", "answer": "x", "id": "1"}
    with pytest.raises(NapkinError, match="two items called '1'"):
        read_task([jsonl(tmp_path / "t.jsonl", row, row)])
