import dataclasses
import platform
import subprocess
import sys
from typing import Literal

import pytest

from napkin.model.config import ModelConfig
from napkin.planning.step.kernel_choice import choose_kernels
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig

MODEL = ModelConfig(vocab_size=300, context_length=256)


def form(precision: Precision, kernels: Literal["plain", "compiled"] = "plain", **changes) -> str:
    model, training = dataclasses.replace(MODEL, **changes), TrainingConfig(kernels=kernels)
    return choose_kernels(Recipe(model=model, training=training), precision).model.attention


def test_attention_is_plain_where_a_cpu_multiplies_bf16_over_short_contexts() -> None:
    assert form(Precision("bf16", "cpu")) == form(Precision("bf16-pure", "cpu")) == "plain"
    assert form(Precision("fp32", "cpu")) == form(Precision("bf16", "cuda")) == "sdpa"
    assert form(Precision("bf16", "cpu"), context_length=1024) == "sdpa"
    assert form(Precision("bf16", "cpu"), attention="sdpa") == "sdpa"
    # The fused operator has no caps.
    assert form(Precision("fp32", "cpu"), attention_softcap=30.0) == "plain"


def test_attention_is_compiled_with_the_other_kernels_where_a_cpu_is_faster_with_it() -> None:
    bf16, fp32 = Precision("bf16", "cpu"), Precision("fp32", "cpu")
    assert form(bf16, "compiled", context_length=1024) == form(bf16, "compiled", context_length=4096) == "compiled"
    assert form(bf16, "compiled", context_length=512) == "plain"
    assert form(bf16, "compiled", context_length=4096, positions="alibi") != "compiled"
    assert form(bf16, "compiled", attention="sdpa") == form(fp32, "compiled", context_length=4096) == "sdpa"
    assert form(fp32, "compiled", context_length=4096, attention_softcap=30.0) == "compiled"


@pytest.mark.parametrize(("name", "fused"), [("adamw", True), ("lion", False)])
def test_the_update_is_fused_where_there_is_a_kernel_and_nobody_said_no(name: str, fused: bool) -> None:
    for chosen, expected in ((None, fused), (False, False)):
        recipe = Recipe(model=MODEL, optimizer=OptimizerConfig(name=name, fused=chosen))
        assert choose_kernels(recipe, Precision("fp32", "cpu")).optimizer.fused is expected


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library is left as it is")
def test_freed_memory_is_kept_from_then_on() -> None:
    program = """
import psutil
from napkin.hardware.host import keep_freed_memory

def kept_of_a_freed_block():
    before = psutil.Process().memory_info().rss
    block = b"x" * 2**26
    del block
    return psutil.Process().memory_info().rss - before

print(kept_of_a_freed_block(), keep_freed_memory(), kept_of_a_freed_block())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, agreed, after = done.stdout.split()
    assert agreed == "True"
    assert int(before) < 2**25 < int(after)
