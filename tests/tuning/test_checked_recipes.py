"""napkin's own tuning, through the door by which `napkin check` takes anyone's program."""

import datetime
from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import napkin
from napkin.chats.token_sequence import Example
from napkin.distributed.process_group import ProcessGroupRanks
from napkin.distributed.ranks import ALONE, RankInfo, Ranks
from napkin.tuning import train_on_examples
from oracles.alignment_cases import CASES, WITH_SCALAR_HEAD, train_state_of
from oracles.alignment_cases import some_examples as supervised_examples


class Recipe:
    """The step of an objective of napkin's, on as many ranks as this process is one of."""

    def __init__(self, case: str = "supervised, token") -> None:
        self.case = case
        self.objective, self._examples = CASES[case]()
        if case.startswith("supervised"):
            self._examples = supervised_examples(16)

    def build(self) -> nn.Module:
        ranks: Ranks = ALONE
        if dist.is_initialized():
            info = RankInfo(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size())
            ranks = ProcessGroupRanks(info, datetime.timedelta(seconds=60))
        self.train_state = train_state_of(ranks, scalar_head=self.case in WITH_SCALAR_HEAD)
        return self.train_state.model

    def examples(self) -> Sequence[Example]:
        return self._examples

    def gradients(self, model: nn.Module, examples: Sequence[Example], arrangement: Any) -> None:
        found = {}

        def keep(loss: Any, norm: Any) -> bool:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    found[name] = parameter.grad.detach().clone()
            return False

        sizes = {1: 1, len(examples): 10**6}
        train_on_examples(
            self.train_state,
            0,
            examples,
            self.objective,
            max_tokens=sizes.get(arrangement.micro_batch_size, 64),
            packing="packed" if arrangement.packed else "padded",
            divided=arrangement.ranks > 1,
            is_fit=keep,
        )
        for name, parameter in model.named_parameters():
            parameter.grad = found.get(name)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("case", ["supervised, token", "supervised, sequence", "dpo", "reward model", "policy, grpo"])
def test_recipes_pass_in_every_arrangement(case: str) -> None:
    found = napkin.check(Recipe(case), examples=4, ranks=1)
    assert found.equal, found
    assert {"packed", "4 micro-batches of 1"} <= {result.name for result in found.results}


@pytest.mark.torture
def test_a_recipe_passes_on_ranks() -> None:
    found = napkin.check(f"{__file__}:Recipe", ranks=2, arrangements=["ranks"])
    assert found.equal, found
    assert len(found.results) == 2
