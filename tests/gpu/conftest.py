"""The device of these tests: a GPU, or the CPU where NAPKIN_GPU_TESTS=cpu shows that the tests themselves run."""

import os

import pytest
import torch


@pytest.fixture
def device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("NAPKIN_GPU_TESTS") == "cpu":
        return "cpu"
    pytest.skip("there is no GPU: NAPKIN_GPU_TESTS=cpu runs these tests on the CPU")


@pytest.fixture
def gpu() -> str:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    return "cuda"
