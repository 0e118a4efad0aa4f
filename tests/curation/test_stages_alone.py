"""Stages as functions on an iterator, and their options."""

import dataclasses
import runpy
import typing
from pathlib import Path
from typing import Any

import pytest

from napkin.curation import Length, Record, apply_stages, make_stage
from napkin.curation.registry import RESERVED, STAGES, stage_class, stage_options
from napkin.errors import NapkinError


def test_stages_pass_on_what_none_of_them_drops_and_say_why_of_the_others() -> None:
    FirstOfEachText = runpy.run_path(str(Path(__file__).parent / "worker_site/curation_stages.py"))["FirstOfEachText"]
    texts = ["a", "bb", "a", "cccc", "bb", "dd"]
    records = [Record(f"t#{number}", text) for number, text in enumerate(texts, start=1)]
    dropped: list[tuple[str, str, str, str]] = []
    kept = apply_stages(
        iter(records),
        [Length(most=3), FirstOfEachText(), Length(least=2)],
        lambda record, stage, why: dropped.append((record.identity, stage, why.rule, why.detail)),
    )
    assert [(record.identity, [entry.stage for entry in record.trace]) for record in kept] == [
        ("t#2", ["length", "first", "length"]),
        ("t#6", ["length", "first", "length"]),
    ]
    assert sorted(dropped) == [
        ("t#1", "length", "too short", "1 < 2 characters"),
        ("t#3", "first", "copy", "of t#1"),
        ("t#4", "length", "too long", "4 > 3 characters"),
        ("t#5", "first", "copy", "of t#2"),
    ]


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("lenght", {}, "there is no stage 'lenght': did you mean 'length'?"),
        ("length", {"lest": 1}, "stage 'length' has no option 'lest': did you mean 'least'?"),
        ("length", {"least": "x"}, "stage 'length': Expected `int`, got `str` - at `least`: .*--help"),
        ("length", {"least": 9, "most": 3}, "stage 'length': most is 3 characters, least is 9"),
    ],
)
def test_an_option_that_is_wrong_is_named(name: str, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(NapkinError, match=complaint.replace("?", r"\?")):
        make_stage(name, options)


@pytest.mark.parametrize("name", STAGES)
def test_a_registered_stage_is_what_commands_and_manifests_need(name: str) -> None:
    cls: Any = stage_class(name)
    assert cls.name == name
    assert {"summarize", "decide", "apply"} <= set(dir(cls)) or {"summarize", "decide"}.isdisjoint(dir(cls))
    assert vars(cls)["__dataclass_params__"].frozen
    # What `dataclass` puts there for want of a docstring.
    assert not (cls.__doc__ or "").startswith(f"{cls.__name__}(")
    assert not {field.name for field in dataclasses.fields(cls)} & RESERVED
    assert {field.name for field in dataclasses.fields(cls)} <= typing.get_type_hints(cls).keys()
    if all(field.default is not dataclasses.MISSING for field in dataclasses.fields(cls)):
        stage = make_stage(name, {})
        filled = {option: value for option, value in stage_options(stage).items() if value is not None}
        assert make_stage(name, filled) == stage
