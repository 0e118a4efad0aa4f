import math
from dataclasses import replace

from napkin import Ledger
from napkin.accounting.ledger import Row
from napkin.accounting.pricing import price, roofline_seconds
from napkin.hardware.ceilings import CatalogueCeilings
from napkin.hardware.device_file import catalogue, find_device
from napkin.hardware.kernel_curves import product_seconds

H100 = CatalogueCeilings(find_device("H100"))


def row(operator: str, module: str = "", *, m: int = 0, read: int = 0, call: str | None = None) -> Row:
    contraction = (1, m, m, m) if m else None
    return Row(module, "forward", operator, "bf16", 2 * m**3, 2 * m**3, 0, contraction, read, 0, 0, 0, call=call)


def ledger(*rows: Row) -> Ledger:
    return Ledger(rows, 0, 0, 0, {}, (), {})


def test_a_large_product_is_bound_by_flops_and_a_copy_by_bytes() -> None:
    product, copy = row("mm", m=8192, read=3 * 2 * 8192**2), row("clone", read=10**9)
    known = H100.efficiency
    alone = product_seconds(find_device("H100"), 8192, 8192, 8192, reuse=math.inf)
    assert alone is not None
    assert known.product_share is not None
    of_flops = alone / known.product_share
    assert 1 < of_flops / (2 * 8192**3 / 989.5e12) < 2
    of_bytes = 10**9 / (known.memory_share * 3.35e12) + known.kernel_seconds
    priced = price(ledger(product, copy), H100)
    assert math.isclose(priced.seconds, of_flops + of_bytes, rel_tol=1e-12)
    assert math.isclose(priced.byte_bound_share, of_bytes / (of_flops + of_bytes), rel_tol=1e-12)
    assert list(priced.by_operator) == ["mm", "clone"]
    assert priced.by_operator["mm"].byte_bound_seconds == 0
    assert priced.by_operator["clone"].byte_bound_seconds == priced.by_operator["clone"].seconds


def test_on_a_device_with_a_queue_a_small_kernel_takes_a_launch_and_a_view_nothing() -> None:
    assert math.isclose(roofline_seconds(row("add", read=16), H100), H100.efficiency.kernel_seconds, rel_tol=1e-5)
    assert roofline_seconds(row("view"), H100) == 0


def test_fused_attention_takes_the_time_of_the_pairs_that_its_mask_leaves() -> None:
    known, (heads, length, head_dim) = H100.efficiency, (64, 4096, 128)
    flops = 4 * heads * length**2 * head_dim
    whole = replace(row("_scaled_dot_product_flash_attention"), flops=flops, causal_flops=flops)
    whole = replace(whole, contraction=(heads, length, length, head_dim))
    filled = (1 + known.attention_width / head_dim) * (1 + known.attention_rows / (heads * length))
    rate = known.attention_share * 989.5e12 / filled
    assert math.isclose(roofline_seconds(whole, H100), flops / rate + known.kernel_seconds, rel_tol=1e-12)
    half = replace(whole, causal_flops=flops // 2)
    assert math.isclose(roofline_seconds(half, H100), flops / 2 / rate + known.kernel_seconds, rel_tol=1e-12)
    plain = replace(half, operator="bmm")
    assert roofline_seconds(plain, H100) == roofline_seconds(replace(plain, causal_flops=flops), H100)


def test_small_products_reach_less_of_the_peak_than_large_ones() -> None:
    rates = [H100.matmul_rate("bf16", n, n, n) for n in (64, 256, 1024, 4096, 16384)]
    assert rates == sorted(rates)
    assert rates[-1] < H100.matmul_peak("bf16")
    assert H100.matmul_rate("bf16", 8192, 8192, 64) == H100.matmul_rate("bf16", 8192, 64, 8192)


def test_blocks_are_taken_together_and_parts_add_up_to_the_whole() -> None:
    rows = [row("mm", f"blocks.{block}.attention.0", m=512) for block in range(12)] + [row("mm", "head2", m=512)]
    priced = price(ledger(*rows), H100)
    assert list(priced.by_module) == ["blocks.*.attention.*", "head2"]
    for parts in (priced.by_operator, priced.by_module, priced.by_phase):
        assert math.isclose(sum(part.seconds for part in parts.values()), priced.seconds)


def test_what_lies_between_operators_lengthens_each_alike() -> None:
    rows = ledger(row("mm", m=512, call="a"), row("add", read=10**8))
    alone, between = price(rows, H100, {"a": 0.5}), price(rows, H100, {"a": 0.5}, between=1.25)
    assert math.isclose(between.seconds, 1.25 * alone.seconds)
    assert math.isclose(between.by_operator["mm"].seconds, 1.25 * 0.5)


def test_twice_the_rows_take_twice_the_seconds_on_every_device() -> None:
    for device in catalogue():
        name = next(name for name in ("bf16", "fp16", "fp32") if name in device.peaks)
        some = replace(row("mm", m=1000, read=10**7), format=name)
        once, twice = (price(ledger(*rows), CatalogueCeilings(device)).seconds for rows in ([some], [some, some]))
        assert math.isclose(2 * once, twice), device.name


def test_cudnns_attention_has_a_share_of_its_own_where_one_is_known() -> None:
    known = replace(H100.efficiency, cudnn_attention_share=2 * H100.efficiency.attention_share)
    with_share, sizes = CatalogueCeilings(H100.device, known), (4096, 4096, 128)
    flash = with_share.attention_rate("bf16", *sizes, heads=64)
    assert with_share.attention_rate("bf16", *sizes, heads=64, cudnn=True) == 2 * flash
    without = CatalogueCeilings(H100.device, replace(known, cudnn_attention_share=None))
    assert without.attention_rate("bf16", *sizes, heads=64, cudnn=True) == flash
