from collections.abc import Iterator

import pytest
import torch

from napkin import Ledger
from oracles.reference_ledgers import gpt2_ledger, gpt2_xl_ledger, llama_ledger


@pytest.fixture(scope="session")
def gpt2() -> Ledger:
    return gpt2_ledger()


@pytest.fixture(scope="session")
def llama() -> Ledger:
    return llama_ledger()


@pytest.fixture(scope="session")
def gpt2_xl() -> Ledger:
    return gpt2_xl_ledger(checkpointing=False)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread while the test runs."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)
