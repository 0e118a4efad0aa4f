from collections.abc import Iterator

import pytest
import torch

from napkin import Ledger
from napkin.accounting import scratch
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
def without_measured_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is run to see what it takes from the allocator: of matrices in bf16 at full size that is a minute."""
    monkeypatch.setattr(scratch, "_by_machine", {})
    monkeypatch.setattr(scratch, "_measure", lambda *_: None)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread while the test runs."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)
