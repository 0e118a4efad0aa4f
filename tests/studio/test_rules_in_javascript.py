"""The rules that a page computes with are Python's: 1,000 random recipes in a real browser, and what is refused."""

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from napkin.accounting.step_rules import block_kept_bytes_rule, run_rule, step_rule
from napkin.errors import NapkinError
from napkin.model.config import preset, presets
from napkin.planning.rules import cache_numbers_by_rule, multiplying_parameters_by_rule, parameters_by_rule
from napkin.studio.javascript import javascript_of
from napkin.studio.rule_fields import FORMAT_BYTES, model_fields
from oracles.browser import Browser


def random_recipe(draw: random.Random) -> dict[str, Any]:
    heads, width = 2 ** draw.randint(0, 7), 16 * draw.randint(1, 16)
    fields: dict[str, Any] = {
        "vocab_size": draw.randint(256, 300_000),
        "context_length": 2 ** draw.randint(5, 20),
        "d_model": heads * width,
        "n_layers": draw.randint(1, 200),
        "n_heads": heads,
        "n_kv_heads": 2 ** draw.randint(0, int(math.log2(heads))),
        "head_dim": width,
        "v_head_dim": draw.choice([width, 64]),
        "d_ff": draw.randint(64, 60_000),
        "tied": draw.random() < 0.5,
        "gated": draw.random() < 0.5,
        "learned_positions": draw.random() < 0.2,
        "n_sharing_layers": draw.choice([0, 0, 1]),
        "batch_size": 2 ** draw.randint(6, 14),
        "micro_batch_size": 2 ** draw.randint(0, 4),
        "loss_chunk_size": 2 ** draw.randint(7, 14),
        "recompute": draw.choice(["none", "selective", "full"]),
        **draw.choice(list(FORMAT_BYTES.values())),
        "state_bytes": draw.choice([0, 4, 8]),
        **{name: 2 ** draw.randint(0, 4) for name in ("data", "shard", "tensor", "pipeline", "context", "expert")},
        "shard_optimizer": draw.random() < 0.5,
        "peak": draw.uniform(1e12, 3e15),
        "efficiency": draw.uniform(0.1, 1.0),
    }
    if draw.random() < 0.4:
        fields |= {
            "n_experts": 2 ** draw.randint(2, 8),
            "experts_per_token": draw.randint(1, 4),
            "n_shared_experts": draw.randint(0, 2),
            "d_expert": draw.randint(64, 8192),
            "n_dense_layers": draw.randint(0, min(3, fields["n_layers"] - 1)),
        }
    if draw.random() < 0.3:
        fields |= {"kv_lora_rank": 512, "q_lora_rank": draw.choice([None, 1536])}
        fields |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    return fields


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser to look with")
def test_a_browser_computes_what_python_computes(tmp_path: Path) -> None:
    draw = random.Random(0)
    steps = [random_recipe(draw) for _ in range(1000)]
    runs = [
        {
            "steps": draw.randint(1, 10**6),
            "seconds": draw.uniform(1e-3, 100),
            "devices": draw.randint(1, 10**5),
            "parameters": draw.uniform(1e6, 1e13),
            "usd_per_hour": draw.uniform(0, 10),
            "watts": draw.uniform(0, 1500),
        }
        for _ in range(1000)
    ]
    script = javascript_of([step_rule, run_rule])
    with Browser(tmp_path / "profile") as browser:
        for rule, recipes in ((step_rule, steps), (run_rule, runs)):
            called = f"{json.dumps(recipes)}.map((each) => {rule.__name__}(each))"
            page = f"(() => {{ 'use strict'; {script}; return {called}; }})()"
            for recipe, found in zip(recipes, browser.run(page), strict=True):
                expected = rule(**recipe)
                assert found.keys() == expected.keys()
                # Sums of integers beyond 2^53 are rounded in the browser.
                assert found == pytest.approx(expected, rel=1e-12), recipe


@pytest.mark.parametrize("name", [name for name, each in presets().items() if not each.model.has_states])
def test_a_published_model_has_the_parameters_of_the_rule_by_layers(name: str) -> None:
    model = presets()[name].model
    found = step_rule(**model_fields(model), batch_size=1, micro_batch_size=1, loss_chunk_size=1, peak=1.0)
    assert found["all_parameters"] == parameters_by_rule(model)
    assert found["multiplying"] == multiplying_parameters_by_rule(model)


def test_layers_that_share_keys_and_values_have_the_parameters_and_the_cache_of_the_rule_by_layers() -> None:
    model = preset("llama-3-8b", kv_sharing=3)
    found = step_rule(**model_fields(model), batch_size=1, micro_batch_size=1, loss_chunk_size=1, peak=1.0)
    assert found["all_parameters"] == parameters_by_rule(model) < parameters_by_rule(preset("llama-3-8b"))
    assert found["cache_bytes"] == 2 * cache_numbers_by_rule(model, model.context_length)[0]


def test_kept_bytes_are_those_of_the_paper_without_dropout_and_with_a_residual_in_16_bits() -> None:
    # Korthikanti et al. 2022, section 4.1: 34 bytes per number of the residual stream, 2 of them masks of dropout; each
    # norm keeps its input (4 in all) and what it returns, which is what products read (4); attention its queries, keys,
    # values and result (8), GELU what is before and after it (16), and a sum per head in fp32.
    kept = block_kept_bytes_rule(
        d_model=64, n_heads=4, n_kv_heads=4, head_dim=16, d_ff=256, gated=False, residual_bytes=2
    )
    assert kept == (8 + 8 + 16) * 64 + 4 * 4


def unbounded(n: float) -> float:
    while n > 1:
        n = n / 2
    return n


def calls_out(n: float) -> float:
    return len(str(n))


def spreads(n: float) -> float:
    return unbounded(*[n])


def takes_many(n: float) -> float:
    return n % 3


@pytest.mark.parametrize("rule", [unbounded, calls_out, spreads, takes_many])
def test_what_is_more_than_arithmetic_is_refused_by_its_line(rule: Callable) -> None:
    with pytest.raises(NapkinError, match=rf"{rule.__name__}, line [0-9]+, `.*` is not translated"):
        javascript_of([rule])


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser to look with")
def test_defaults_floors_powers_and_branches_are_pythons(tmp_path: Path) -> None:
    script = javascript_of([everything])
    cases = [{"a": a, "b": b, **c} for a in (-7, 0, 2.5) for b in (2, 3) for c in ({}, {"c": None}, {"c": 4})]
    with Browser(tmp_path / "profile") as browser:
        for case in cases:
            given = f"{case['a']}, {case['b']}" + (f", {{c: {json.dumps(case['c'])}}}" if "c" in case else "")
            found = browser.run(f"(() => {{ 'use strict'; {script}; return everything({given}); }})()")
            assert found == pytest.approx(everything(**case), rel=1e-15)


SCALE = 2.5


def everything(a: float, b: int = 2, *, c: float | None = 1.5) -> float:
    if c is None:
        low = -a // b
    elif not a > 0 or b != 2:
        low = max(a, 0.0, math.sqrt(b)) ** 2
    else:
        low = SCALE
    low -= b * 2
    values = {"low": low, "high": c or 0}
    other = added(values["low"], by=values["high"])
    return other if a == 0 and b >= 2 else other * 3 - a / b


def added(a: float, *, by: float = 1.0) -> float:
    return a + by
