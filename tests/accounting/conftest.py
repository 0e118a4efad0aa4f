import pytest

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
