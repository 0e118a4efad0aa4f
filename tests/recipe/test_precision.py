import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from napkin.errors import NapkinError
from napkin.hardware.host import detect_host
from napkin.recipe.precision import Precision, choose_device, choose_precision


@pytest.mark.parametrize(("native", "products"), [(True, "bf16"), (False, "fp32")])
def test_auto_is_bf16_where_the_processor_multiplies_it(native: bool, products: str) -> None:
    host = dataclasses.replace(detect_host(), native_bf16=native)
    assert choose_precision("auto", "cpu", host) == Precision(products, "cpu")  # pyright: ignore[reportArgumentType]
    assert choose_precision("fp32", "cpu", host) == Precision("fp32", "cpu")
    assert choose_precision("bf16", "cpu", host) == Precision("bf16", "cpu")


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_products_come_in_the_format_that_was_chosen(precision: str, dtype: torch.dtype) -> None:
    a = torch.ones(2, 2)
    with Precision(precision, "cpu").autocast():  # pyright: ignore[reportArgumentType]
        assert (a @ a).dtype == dtype
    assert (a @ a).dtype == torch.float32


def test_a_gpu_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        assert choose_device("auto") == "cuda"
    else:
        assert choose_device("auto") == choose_device("cpu") == "cpu"
        with pytest.raises(NapkinError, match="no GPU"):
            choose_device("cuda")


def test_int8_is_emulated_where_torch_is_kept_from_the_instructions_that_sum_it_exactly() -> None:
    program = """
import torch
from napkin.hardware.host import detect_host
from napkin.kernels.products.linear import narrow_linear
from napkin.recipe.precision import choose_precision
ones = torch.ones(32, 64)
form = choose_precision("int8", "cpu", detect_host()).narrow_form
with torch.autocast("cpu", torch.bfloat16):
    print(form, narrow_linear("int8", form)(ones, ones, None).unique().tolist())
"""
    capped = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    found = subprocess.run([sys.executable, "-c", program], env=capped, capture_output=True, text=True, check=True)
    # Sums of pairs of products in 16 bits give half of it.
    assert found.stdout == "emulated [64.0]\n"
