import dataclasses

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
