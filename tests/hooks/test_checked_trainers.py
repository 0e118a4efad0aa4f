"""`napkin check` of the real Trainer and SFTTrainer: right settings pass, and wrong ones are found and named."""

from pathlib import Path

import pytest

import napkin
from peers import peer

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

FILE = Path(__file__).parent.parent / "oracles" / "checked_trainers.py"
AVERAGED = "each micro-batch is averaged by itself"


@pytest.fixture(autouse=True)
def libraries() -> None:
    for name in ("transformers", "trl", "datasets"):
        peer(name)


@pytest.mark.parametrize(("trainer", "packing"), [("sft", ""), ("plain", ""), ("padding_free", "padding-free")])
def test_right_settings_pass(trainer: str, packing: str) -> None:
    found = napkin.check(f"{FILE}:{trainer}", ranks=1)
    assert found.equal, found
    assert found.normalisation == "the mean over trained tokens"
    names = {result.name for result in found.results}
    assert names >= {"the same again", "permuted", "4 micro-batches of 2", *([packing] if packing else [])}


def test_trls_packing_resets_attention_and_positions() -> None:
    found = napkin.check(f"{FILE}:packed", ranks=1, arrangements=["packed"])
    assert found.equal
    assert [result.name for result in found.results] == ["packing"]


@pytest.mark.parametrize(
    ("trainer", "arrangement", "differing", "said"),
    [
        ("before_446", "micro-batches", {"4 micro-batches of 2", "8 micro-batches of 1"}, AVERAGED),
        ("wrapped", "packed", {"packing"}, "attention is not reset between documents"),
        ("with_dropout", "again", {"the same again"}, "attention_dropout: p = 0.1"),
    ],
)
def test_mistakes_are_found_and_named(trainer: str, arrangement: str, differing: set[str], said: str) -> None:
    found = napkin.check(f"{FILE}:{trainer}", ranks=1, arrangements=[arrangement])
    assert {result.name for result in found.results if result.differs} == differing
    assert all(said in result.cause for result in found.results if result.differs)


@pytest.mark.parametrize("trainer", ["sft", "per_rank"])
def test_ranks_that_divide_by_their_own_tokens_are_found(trainer: str) -> None:
    found = napkin.check(f"{FILE}:{trainer}", arrangements=["ranks"])
    assert [result.differs for result in found.results] == [trainer == "per_rank"] * 2
    assert all("each rank is averaged by itself" in result.cause for result in found.results if result.differs)
