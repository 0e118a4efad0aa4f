"""Values of a sweep's options: each is read as the recipe's field has it, and refused where it has not."""

import math
import random

import pytest

from napkin.errors import NapkinError
from napkin.scaling.trials import Axis, Value, read_axis


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("--model.d-model", "64,128, 256", (64, 128, 256)),
        ("--optimizer.learning-rate", "1e-3,3e-3,None", (1e-3, 3e-3, None)),
        ("--training.micro-batch-size", "auto,4,None", ("auto", 4, None)),
        ("--training.keep-best", "True,false", (True, False)),
        ("--optimizer.name", "adamw,muon", ("adamw", "muon")),
        ("--data.train", "../a.tokens,b.tokens", ("../a.tokens", "b.tokens")),
    ],
)
def test_values_have_the_type_of_their_field(name: str, text: str, values: tuple[Value, ...]) -> None:
    axis = read_axis(name, text)
    assert axis.values == values
    assert [type(each) for each in axis.values] == [type(each) for each in values]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("--model.d-modle", "64", "did you mean --model.d-model?"),
        ("--training.learning-rate", "1e-3", "did you mean --optimizer.learning-rate?"),
        ("--model.d-model", "64,wide", "'wide' is not a whole number"),
        ("--model.d-model", "64.5", "'64.5' is not a whole number"),
        ("--optimizer.learning-rate", "fast", "'fast' is not a number or None"),
        ("--optimizer.name", "adamw,adam2", "'adam2' is not one of "),
        ("--model.d-model", "64,,128", "lacks a value"),
        ("--model.d-model", "", "lacks a value"),
        ("--model.d-model", "64,128,64", "names 64 twice"),
        ("--optimizer.learning-rate", "1e-2..1e-4", "from a number above 0 to a larger one"),
        ("--optimizer.learning-rate", "0..1e-4", "from a number above 0 to a larger one"),
        ("--optimizer.learning-rate", "1e-4..nan", "from a number above 0 to a larger one"),
        ("--optimizer.learning-rate", "1e-4..inf", "from a number above 0 to a larger one"),
        ("--optimizer.name", "adamw..muon", "not numbers"),
    ],
)
def test_what_is_no_value_is_refused_by_name(name: str, text: str, said: str) -> None:
    with pytest.raises(NapkinError, match=r"--") as refused:
        read_axis(name, text)
    assert said in str(refused.value)


def test_numbers_of_a_range_are_uniform_in_their_logarithm() -> None:
    axis, generator = read_axis("--optimizer.learning-rate", "1e-4..1e-2"), random.Random(0)
    drawn = [axis.draw(generator) for _ in range(2000)]
    logs = sorted(math.log10(each) for each in drawn if isinstance(each, float))
    assert len(logs) == 2000
    # Kolmogorov and Smirnov's distance to the uniform distribution, at its 99.9% bound.
    distance = max(abs((place + 0.5) / 2000 - (each + 4) / 2) for place, each in enumerate(logs))
    assert distance < 1.95 / math.sqrt(2000)
    whole = read_axis("--model.d-model", "64..512")
    assert all(isinstance(each, int) and 64 <= each <= 512 for each in (whole.draw(generator) for _ in range(200)))


def test_the_option_of_an_axis_is_what_was_typed() -> None:
    assert Axis("model.d_model").option == "--model.d-model"
