"""Verifiable instructions on random texts beside lm-evaluation-harness's checks; of languages, capitals and sentences,
which other libraries decide there, the checks are not compared."""

import random
import sys
from types import ModuleType

import pytest

from grading.test_instructions import CASES
from napkin.grading.instructions import CHECKS
from peers import peer

PIECES = (
    "*|**|***|******|\n|\n\n| |- |* |a|b|Section 1|Section 2|section|P.S.|p. s. |P.P.S|[name]|[x|<<A>>|<<|>>|rain|sun|"
    'no|No|can|cannot|q|Q|"|{|}|{"a":1}|```json\n|```|Say it.|The end.|the end|My answer is yes.|I|,|.|second|Second,'
).split("|")
DECIDED_ELSEWHERE = {
    "language:response_language",
    "change_case:english_capital",
    "change_case:english_lowercase",
    "change_case:capital_word_frequency",
    "length_constraints:number_sentences",
}


@pytest.mark.peers
def test_random_texts_are_judged_as_by_the_published_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    peer("lm_eval")
    nltk = peer("nltk")
    # Asked for at the import only: the checks that use them are left out here.
    for name in ("langdetect", "immutabledict"):
        module = ModuleType(name)
        module.__dict__["immutabledict"] = dict
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(nltk.data, "find", lambda *names, **options: None)
    monkeypatch.setattr(nltk, "download", lambda *names, **options: True)
    registry = peer("lm_eval.tasks.ifeval.instructions_registry")
    draw, differ = random.Random(0), []
    for name, parameters, good, bad in CASES:
        if name in DECIDED_ELSEWHERE:
            continue
        theirs = registry.INSTRUCTION_DICT[name](name)
        theirs.build_description(**parameters)
        for number in range(400):
            pieces = list(draw.choice(good + bad)) if number % 2 else []
            for _ in range(draw.randint(1, 9)):
                pieces.insert(draw.randint(0, len(pieces)), draw.choice(PIECES))
            text = "".join(pieces)
            if text.strip() and bool(theirs.check_following(text)) != CHECKS[name](text, parameters):
                differ.append((name, text))
    assert not differ
