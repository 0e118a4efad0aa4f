"""The texts that a speedrun makes itself: pages of the standard library's docstrings where no pages are given, and
conversations made by rule: questions about what a document's heading names, answered by its first paragraph, and sums
of a careless teacher.
"""

import ast
import json
import random
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from napkin.cli.common.files import open_documents
from napkin.data.corpus import split_into_sides, standard_library
from napkin.errors import NapkinError
from napkin.files import atomic_write_text, draft_folder

VALIDATION_FRACTION = 0.05
"""Documents that neither pre-training nor tuning sees, by the same hash in every stage."""
ENVIRONMENT = "sums:1"
WRONG = 2 / 3
"""Fraction of the teacher's sums whose result is one too large, for rewards to correct."""
SUMS = 6000
MOST_CONVERSATIONS = 4000
MOST_ITEMS = 200
CHOICES = 4
_HEADING = re.compile(r"#{1,3} +(.+)")
_MARKS = re.compile(r"[`*_#\[\]]|\(https?:[^)]*\)")
_LONGEST_TITLE, _SHORTEST_ANSWER, _LONGEST_ANSWER = 60, 30, 240


def write_standard_pages(folder: Path) -> int:
    """Write an HTML page of the docstrings of each module of Python's standard library, and return their number.

    Modules are parsed, not imported.
    """
    written = 0
    with draft_folder(folder) as draft:
        for document in standard_library():
            try:
                module = ast.parse(document.text)
            except (SyntaxError, ValueError, RecursionError):
                continue
            about = ast.get_docstring(module)
            if not about:
                continue
            name = document.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            parts = [f"<h1>The module {escape(name)}</h1>", *_paragraphs(about)]
            for node in ast.walk(module):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    text = ast.get_docstring(node)
                    if text and len(text) > 2 * _SHORTEST_ANSWER:
                        parts += [f"<h2>{escape(node.name)}</h2>", *_paragraphs(text)]
            body = "\n".join(parts)
            page = f'<!doctype html>\n<html lang="en"><head><title>{escape(name)}</title></head>\n<body><main>{body}'
            (draft / f"{name}.html").write_text(f"{page}</main></body></html>\n", encoding="utf-8")
            written += 1
        draft.rename(folder)
    return written


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text):
        yield f"<p>{escape(' '.join(paragraph.split()))}</p>"


def question_and_answer(text: str) -> tuple[str, str] | None:
    """What a document's first heading names, as a question, and its first paragraph; None where either is missing.

    >>> question_and_answer("# The `wave` module\\n\\nIt reads and writes files of sampled sound. More.")
    ('What is the wave module?', 'It reads and writes files of sampled sound. More.')
    """
    title = None
    for block in re.split(r"\n\s*\n", text[:8192]):
        line = block.strip()
        if heading := _HEADING.fullmatch(line):
            if title is None:
                title = " ".join(_MARKS.sub("", heading[1]).split())
        elif title is not None and len(line) >= _SHORTEST_ANSWER and line[0].isalpha():
            answer = " ".join(_MARKS.sub("", line).split())
            if not title or len(title) > _LONGEST_TITLE or len(answer) < _SHORTEST_ANSWER:
                return None
            if len(answer) > _LONGEST_ANSWER:
                # The sentences that fit; of one that is too long, the words that fit.
                cut = answer[:_LONGEST_ANSWER]
                end = cut.rfind(". ")
                answer = cut[: end + 1] if end > _SHORTEST_ANSWER else cut[: cut.rfind(" ")]
            named = title[0].lower() + title[1:] if title[:1].isupper() and title[1:2].islower() else title
            return f"What is {named.rstrip('?.:!')}?", answer
    return None


def write_conversations(corpus: Path, folder: Path, seed: int) -> None:
    """Write train.jsonl, validation.jsonl, and task.jsonl, questions whose right answer stands among others.

    Held-out documents are in validation.jsonl and task.jsonl alone. Raises NapkinError where no document has a heading
    above a paragraph.
    """
    sides: dict[str, list[tuple[str, str]]] = {"training": [], "validation": []}
    seen: set[str] = set()
    for side, document in split_into_sides(open_documents([str(corpus)]), VALIDATION_FRACTION):
        turns = question_and_answer(document.text)
        if turns is not None and turns[0] not in seen:
            seen.add(turns[0])
            sides[side].append(turns)
    if not sides["training"]:
        raise NapkinError(f"no document of '{corpus}' has a heading above a paragraph: use pages with headings")
    draw = random.Random(seed)
    draw.shuffle(sides["training"])
    asked = [_conversation(*each) for each in sides["training"][:MOST_CONVERSATIONS]] + list(_sums(draw, seed))
    draw.shuffle(asked)
    with draft_folder(folder) as draft:
        atomic_write_text(draft / "train.jsonl", "".join(asked))
        held_out = sides["validation"] or sides["training"][-20:]
        atomic_write_text(draft / "validation.jsonl", "".join(_conversation(*each) for each in held_out[:MOST_ITEMS]))
        atomic_write_text(draft / "task.jsonl", "".join(_items(sides["validation"], draw)))
        draft.rename(folder)


def _conversation(question: str, answer: str) -> str:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages}, ensure_ascii=False) + "\n"


def _sums(careless: random.Random, seed: int) -> Iterator[str]:
    from napkin.environments.environment import SolvedEnvironment
    from napkin.environments.registry import environment_named

    environment = environment_named(ENVIRONMENT)
    assert isinstance(environment, SolvedEnvironment)
    for number in range(SUMS):
        task = environment.start(seed * SUMS + number)
        result = int(environment.solution(task.state)) + (careless.random() < WRONG)
        yield _conversation(task.messages[-1].content, str(result))


def _items(held_out: Sequence[tuple[str, str]], draw: random.Random) -> Iterator[str]:
    for number, (question, answer) in enumerate(held_out[:MOST_ITEMS]):
        others = [each for each in dict.fromkeys(text for _, text in held_out) if each != answer]
        if len(others) < CHOICES - 1:
            return
        choices = [answer, *draw.sample(others, CHOICES - 1)]
        draw.shuffle(choices)
        row = {"id": str(number), "prompt": question, "choices": choices, "answer": choices.index(answer)}
        yield json.dumps(row, ensure_ascii=False) + "\n"
