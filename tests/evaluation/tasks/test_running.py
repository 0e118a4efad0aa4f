"""Tasks put to a tiny random model, whose log-probabilities are computed here pair by pair, token by token."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from napkin.chats.chat_template import ChatTemplate
from napkin.errors import NapkinError
from napkin.evaluation.tasks import (
    Item,
    ItemResult,
    Prompting,
    Task,
    compare_results,
    open_log,
    plan_task,
    read_result,
    read_task,
    run_task,
    settings_of,
    summarise,
    write_result,
)
from napkin.evaluation.tasks.prompts import examples_of, messages_of, prompt_text, prompted
from napkin.evaluation.tasks.running import fitting_items, generated_scores
from napkin.inference.loaded_model import LoadedModel
from napkin.tokenizer import BPETokenizer, train_bpe
from oracles.served_model import tiny_served_model

MODEL = tiny_served_model()
DEV = tuple(
    Item(f"d{n}", f"Question: {n} + 1?\nAnswer:", ("one", "two"), n % 2, shown=("one", "two")[n % 2]) for n in range(6)
)
ITEMS = tuple(
    Item(str(n), f"Question: {n} times {n}?\nAnswer:", (f"{n} é", "is it more than", "no"), n % 3, group=str(n // 2))
    for n in range(40)
)
TASK = Task("sums", "choice", ITEMS, DEV, description="Sums.\n\n")


@torch.no_grad()
def logprob(context: Sequence[int], continuation: Sequence[int]) -> float:
    """By one forward pass for each token."""
    total, limit = 0.0, MODEL.model.config.context_length
    ids = list(context)
    for token in continuation:
        logits = MODEL.model(torch.tensor([ids[-limit:]]))[0, -1].double()
        total += float(logits[token] - logits.logsumexp(0))
        ids.append(token)
    return total


def _brier(logprobs: np.ndarray, right: int) -> float:
    p = np.exp(logprobs) / np.exp(logprobs).sum()
    return float(((p - np.eye(len(p))[right]) ** 2).sum())


def ids(text: str) -> list[int]:
    return [*MODEL.start_ids, *text.encode()]


def run(task: Task, prompting: Prompting, path: Path | None = None) -> list[Any]:
    with open_log(path, {"task": task.name}) as log:
        return run_task(task, MODEL, prompting, log)


def test_scores_of_choices_are_those_of_each_pair_by_itself() -> None:
    results = run(TASK, Prompting(shots=2, unconditional=True))
    shots = "Sums.\n\nQuestion: 0 + 1?\nAnswer: one\n\nQuestion: 1 + 1?\nAnswer: two\n\n"
    for item, result in list(zip(ITEMS, results, strict=True))[::7]:
        own = np.array([logprob(ids(shots + item.prompt), f" {choice}".encode()) for choice in item.choices])
        alone = np.array([logprob(ids("Answer:"), f" {choice}".encode()) for choice in item.choices])
        assert result.logprobs == pytest.approx(own, abs=1e-4)
        assert result.unconditional == pytest.approx(alone, abs=1e-4)
        n_bytes = np.array([len(choice.encode()) for choice in item.choices])
        assert result.scores == {
            "acc": own.argmax() == item.right,
            "acc_norm": (own / [len(choice) for choice in item.choices]).argmax() == item.right,
            "acc_bytes": (own / n_bytes).argmax() == item.right,
            "acc_tokens": (own / (n_bytes + 1)).argmax() == item.right,
            "acc_uncond": (own - alone).argmax() == item.right,
            "brier": pytest.approx(_brier(own, item.right), abs=1e-4),
        }


def test_of_a_minimal_pair_whole_texts_are_scored() -> None:
    task = Task("pairs", "pair", (Item("a", "", ("Ann runs.", "Ann run.")), Item("b", "", ("Go!", "Goes!"))))
    for item, result in zip(task.items, run(task, Prompting()), strict=True):
        good, bad = (logprob(MODEL.start_ids, choice.encode()) for choice in item.choices)
        assert result.logprobs == pytest.approx((good, bad), abs=1e-4)
        assert result.scores == {"acc": good > bad}


def test_generated_answers_are_the_likeliest_tokens_up_to_a_stop_text() -> None:
    prompts = [item.prompt for item in ITEMS[:5]]
    greedy = []
    for prompt in prompts:
        tokens = ids(prompt)
        for _ in range(12):
            tokens.append(int(MODEL.model(torch.tensor([tokens]))[0, -1].argmax()))
        greedy.append(
            MODEL.tokenizer.decode_bytes(tokens[-12:]).partition(b"<|endoftext|>")[0].decode(errors="replace")
        )
    stop = greedy[0][4:6]
    expected = [text.partition(stop)[0] for text in greedy]
    items = tuple(
        dataclasses.replace(item, choices=(), answer=text.strip() or "-")
        for item, text in zip(ITEMS, expected, strict=False)
    )
    task = Task("free", "exact", items, stop=(stop,), max_tokens=12)
    results = run(task, Prompting())
    assert [result.text for result in results] == expected
    assert [result.scores["exact_match"] for result in results] == [float(text.strip() != "") for text in expected]


def test_an_answer_is_the_number_that_is_marked_or_concluded() -> None:
    item = Item("x", "?", answer="so: #### 1,026")
    task = Task("t", "number", (item,), max_tokens=4)

    class Writes(LoadedModel):
        def complete(
            self, prompts: Any, max_new_tokens: int, stop: Any, sampling: Any = None
        ) -> Iterator[tuple[int, str]]:
            yield 0, "therefore 1026.0"

    with open_log(None, {}) as log:
        (result,) = run_task(task, Writes.of(MODEL.model, MODEL.tokenizer), Prompting(), log)
    assert (result.found, result.scores) == ("1026.0", {"exact_match": 1.0})


def test_examples_are_the_first_of_the_section_or_drawn_with_the_seed() -> None:
    other = dataclasses.replace(DEV[0], name="other", section="algebra", prompt="Algebra?")
    task = dataclasses.replace(TASK, dev=(*DEV, other))
    assert examples_of(task, "algebra", Prompting(1)) == [other]
    assert [each.name for each in examples_of(task, "", Prompting(3))] == ["d0", "d1", "d2"]
    drawn = examples_of(task, "", Prompting(3, seed=1))
    assert drawn == examples_of(task, "", Prompting(3, seed=1)) != examples_of(task, "", Prompting(3, seed=2))
    with pytest.raises(NapkinError, match=r"2 examples.*1.*algebra"):
        examples_of(task, "algebra", Prompting(2))


def test_a_question_is_not_its_own_example() -> None:
    found = prompted(TASK, DEV[0], MODEL, Prompting(2), DEV[:2])
    assert found.pairs[0][0] == tuple(ids(prompt_text(TASK, DEV[0], DEV[1:2])))


def test_conversations_have_examples_as_answers() -> None:
    assert messages_of(TASK, ITEMS[0], DEV[:1]) == [
        ("user", f"Sums.\n\n{DEV[0].prompt}"),
        ("assistant", "one"),
        ("user", ITEMS[0].prompt),
    ]
    with pytest.raises(NapkinError, match="has no chat template"):
        run(TASK, Prompting(chat=True))


def test_a_chat_template_holds_the_question_and_the_choice_begins_the_answer() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] ")
    model = dataclasses.replace(MODEL, chat_template=template)
    found = prompted(TASK, ITEMS[3], model, Prompting(1, chat=True), DEV[:1])
    text = f"[user] Sums.\n\n{DEV[0].prompt}\n[assistant] one\n[user] {ITEMS[3].prompt}\n[assistant] "
    assert found.pairs == tuple((tuple(text.encode()), tuple(choice.encode())) for choice in ITEMS[3].choices)


def short(context_length: int) -> LoadedModel:
    return dataclasses.replace(MODEL, config=dataclasses.replace(MODEL.config, context_length=context_length))


def test_examples_that_do_not_fit_are_dropped_and_then_tokens() -> None:
    long = max(len(ids(prompt_text(TASK, ITEMS[0], DEV[:n]))) + len(" is it more than") - 1 for n in (2,))
    fits = prompted(TASK, ITEMS[0], short(long), Prompting(2), DEV[:2])
    assert (fits.dropped_examples, fits.cut_tokens) == (0, 0)
    fewer = prompted(TASK, ITEMS[0], short(long - 1), Prompting(2), DEV[:2])
    assert (fewer.dropped_examples, fewer.cut_tokens) == (1, 0)
    assert fewer.pairs[0][0] == tuple(ids(prompt_text(TASK, ITEMS[0], DEV[1:2])))
    cut = prompted(TASK, ITEMS[0], short(20), Prompting(2), DEV[:2])
    assert cut.dropped_examples == 2
    assert cut.cut_tokens > 0
    with pytest.raises(NapkinError, match=r"item 0: choice 2.*16.*model's.*15"):
        prompted(TASK, ITEMS[0], short(15), Prompting(), [])
    generated = dataclasses.replace(TASK, kind="exact", max_tokens=30)
    item = dataclasses.replace(ITEMS[0], choices=(), answer="x")
    cut = prompted(generated, item, short(40), Prompting(), [])
    assert cut.context == tuple(ids(prompt_text(generated, item, [])))[-10:]
    with pytest.raises(NapkinError, match=r"answer.*30 tokens"):
        prompted(generated, item, short(30), Prompting(), [])


def test_an_item_that_cannot_fit_is_found_before_the_run() -> None:
    long = Item("long", "?", ("x" * 60, "y"))
    task = dataclasses.replace(TASK, items=(*ITEMS[:3], long))
    with pytest.raises(NapkinError, match=r"long: choice 1.*61.*model's.*50"):
        fitting_items(task, short(50), Prompting())
    left = fitting_items(task, short(50), Prompting(), skip_bad=True)
    assert left.items == ITEMS[:3]
    assert len(left.left_out) == 1
    assert fitting_items(task, short(70), Prompting()) == task


def test_a_token_across_the_boundary_is_divided_so_that_every_byte_is_predicted_once() -> None:
    tokenizer = train_bpe(["Answer:abc Answer:abc def def"] * 20, 300)

    class Merged(LoadedModel):
        def encode(self, text: str) -> list[int]:
            return tokenizer.encode(text)

    item = Item("x", "Answer:", ("abc", "def"))
    for delimiter in ("", " "):
        task = Task("t", "choice", (item,), delimiter=delimiter)
        found = prompted(task, item, Merged.of(MODEL.model, MODEL.tokenizer), Prompting(), [])
        for (context, continuation), choice in zip(found.pairs, item.choices, strict=True):
            assert tokenizer.decode_bytes(context[1:]) == b"Answer:"
            assert tokenizer.decode_bytes(continuation) == f"{delimiter}{choice}".encode()
    assert isinstance(tokenizer, BPETokenizer)


def test_the_plan_counts_shared_beginnings_once() -> None:
    task = dataclasses.replace(TASK, items=ITEMS[:8])
    plan = plan_task(task, MODEL, Prompting(shots=1), timed_items=2)
    sequences = {
        tuple(ids(f"{prompt_text(task, item, DEV[:1])} {choice}")[:-1])
        for item in task.items
        for choice in item.choices
    }
    nodes = {sequence[:length] for sequence in sequences for length in range(1, len(sequence) + 1)}
    assert (plan.items, plan.sequences) == (8, 24)
    assert (plan.tokens, plan.computed_tokens) == (sum(map(len, sequences)), len(nodes))
    assert plan.longest == max(map(len, sequences))
    assert plan.seconds is not None
    assert plan.seconds > 0


class Killed(Exception):
    pass


def test_a_killed_evaluation_goes_on_with_the_items_that_are_left(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    asked: list[int] = []

    class Dies(LoadedModel):
        def logprobs(self, pairs: Any) -> list[float]:
            asked.append(len(pairs))
            if len(asked) == 2:
                raise Killed
            return super().logprobs(pairs)

    with pytest.raises(Killed), open_log(path, {"a": 1}) as log:
        run_task(TASK, Dies.of(MODEL.model, MODEL.tokenizer), Prompting(), log)
    with path.open("ab") as file:
        file.write(b'{"name": "torn')
    with open_log(path, {"a": 1}) as log:
        assert len(log.done) == 32
        results = run_task(TASK, Dies.of(MODEL.model, MODEL.tokenizer), Prompting(), log)
    assert asked == [96, 24, 24]
    assert results == run(TASK, Prompting())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("name") for line in lines[1:]] == [item.name for item in ITEMS]


def test_a_log_of_other_settings_or_of_something_else_is_not_continued(tmp_path: Path) -> None:
    run(TASK, Prompting(), tmp_path / "log.jsonl")
    with pytest.raises(NapkinError, match="other settings"), open_log(tmp_path / "log.jsonl", {"task": "other"}):
        pass
    before = (tmp_path / "log.jsonl").read_bytes()
    (tmp_path / "log.jsonl").write_bytes(before.replace(b'"scores"', b'"scares"', 1))
    with pytest.raises(NapkinError, match="line 2 is damaged"):
        run(TASK, Prompting(), tmp_path / "log.jsonl")
    (tmp_path / "letter.txt").write_text("Dear reader")
    with pytest.raises(NapkinError, match="not a log of items"):
        run(TASK, Prompting(), tmp_path / "letter.txt")
    assert (tmp_path / "letter.txt").read_text() == "Dear reader"


def test_a_result_is_read_as_it_was_written_and_compares_item_by_item(tmp_path: Path) -> None:
    task = dataclasses.replace(TASK, files={"sums.jsonl": "12"})
    settings = settings_of(task, MODEL.about(), Prompting())
    results = run(task, Prompting())
    first = summarise(settings, task, results)
    write_result(tmp_path / "a.json", first)
    assert read_result(tmp_path / "a.json") == first
    assert first.scores["acc"].groups == 20
    flipped = [
        dataclasses.replace(each, scores={"acc": 1 - each.scores["acc"]} if n < 10 else {"acc": each.scores["acc"]})
        for n, each in enumerate(results)
    ]
    second = summarise(settings, task, flipped[::-1][5:])
    found = compare_results(first, second)
    assert found.items == 35
    assert found.discordance == pytest.approx(10 / 35)
    with pytest.raises(NapkinError, match="different files"):
        compare_results(first, dataclasses.replace(second, task={**second.task, "files": {"sums.jsonl": "13"}}))
    with pytest.raises(NapkinError, match="has no score 'f1'"):
        compare_results(first, second, "f1")
    with pytest.raises(NapkinError, match="there is no result"):
        read_result(tmp_path / "b.json")


def test_a_last_word_is_right_where_the_model_would_write_it(tmp_path: Path) -> None:
    written = dict(MODEL.complete([ids("To be"), ids("Or not")], 4, ()))
    words = [written[0].strip() or "x", "zebra"]
    rows = [{"text": f"{passage} {word}"} for passage, word in zip(("To be", "Or not"), words, strict=True)]
    (tmp_path / "lambada.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = read_task([tmp_path / "lambada.jsonl"])
    assert (task.kind, task.items[1].answer) == ("last_word", "zebra")
    results = run(task, Prompting())
    for passage, item, result in zip(("To be", "Or not"), task.items, results, strict=True):
        tokens = list(f" {item.answer}".encode())
        assert result.scores["nats"] == pytest.approx(-logprob(ids(passage), tokens), abs=1e-4)
        (greedy,) = (text for _, text in MODEL.complete([ids(passage)], len(tokens), ()))
        assert result.scores["acc"] == float(greedy.encode() == bytes(tokens))
    summary = summarise(settings_of(task, MODEL.about(), Prompting()), task, results)
    assert summary.scores["nats"].mean == pytest.approx(np.mean([each.scores["nats"] for each in results]))


def test_instructions_are_scored_by_prompt_and_one_by_one(tmp_path: Path) -> None:
    asked = [["punctuation:no_comma", {}], ["startend:quotation", {}], ["keywords:existence", {"keywords": ["a"]}]]
    rows = [
        {"key": n, "prompt": "Write.", "instruction_id_list": [x[0] for x in part], "kwargs": [x[1] for x in part]}
        for n, part in enumerate((asked, asked[:1]))
    ]
    (tmp_path / "ifeval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = read_task([tmp_path / "ifeval.jsonl"])
    assert (task.kind, task.max_tokens) == ("instructions", 1280)
    results = [
        ItemResult(item.name, "", "", generated_scores(task.kind, item, text)[1], text=text)
        for item, text in zip(task.items, ("a plain *answer*", "b"), strict=True)
    ]
    assert [each.scores["prompt_strict"] for each in results] == [0, 1]
    summary = summarise(settings_of(task, {}, Prompting()), task, results)
    assert summary.task["score"] == "prompt_strict"
    assert summary.scores["prompt_strict"].mean == 0.5
    # Three of four instructions; those of a prompt are one cluster: residuals sum to -1/4 and 1/4.
    assert summary.scores["instruction_strict"].mean == 0.75
    assert summary.scores["instruction_strict"].standard_error == pytest.approx((2 * 2 * 0.25**2) ** 0.5 / 4)
    assert run(dataclasses.replace(task, max_tokens=4), Prompting())[0].scores.keys() == results[0].scores.keys()


def test_the_calibration_of_choices_is_in_the_result() -> None:
    results = run(TASK, Prompting())
    found = summarise(settings_of(TASK, {}, Prompting()), TASK, results).calibration
    assert found is not None
    confidence = [np.exp(each.logprobs).max() / np.exp(each.logprobs).sum() for each in results]
    right = np.mean([each.scores["acc"] for each in results])
    assert found.overconfidence == pytest.approx(np.mean(confidence) - right)
