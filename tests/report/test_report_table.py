import io

import pytest
from rich.console import Console

from napkin.accounting.quantities import QuantityRow, format_figure, format_ratio
from napkin.report.headline import reconcile_table

ROWS = [
    QuantityRow("parameters", "count", 123_532_032, 124_475_904, 124_475_904, "no biases, norms and positions"),
    QuantityRow("FLOPs per step, all query-key pairs", "FLOP", 3.92e14, 4.496e14, None, "the rule knows no attention"),
    QuantityRow("peak memory", "bytes", 1.99e9, 22_412_918_784, 22_688_038_912, "16 bytes per parameter " * 8),
    QuantityRow("memory [that] stays", "bytes", None, 1_493_710_848, 1_493_712_896),
    QuantityRow("seconds per step", "seconds", 0.989, 1.02, 1.087, "the rule knows no attention"),
    QuantityRow("rate", "FLOP/s", None, 4.41e14, 4.136e14),
    QuantityRow("MFU", "share", 0.4, 0.446, 0.418),
]


def printed(rows: list[QuantityRow], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(reconcile_table(rows))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_table_fits_into_80_columns_and_loses_no_figure():
    text = printed(ROWS)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for figure in ["123,532,032", "124,475,904", "450 TFLOP", "22.7 GB", "1.09 s", "441 TFLOP/s", "41.8%", "0.938"]:
        assert figure in text
    assert "memory [that] stays" in text


def test_a_plan_has_no_meter_columns():
    rows = [QuantityRow(row.quantity, row.unit, row.rule, row.count, None, row.note) for row in ROWS]
    assert "meter/count" in printed(ROWS)
    assert printed(rows).splitlines()[0].split() == ["quantity", "rule", "count"]


def test_notes_stand_below_the_figures_each_once():
    text = printed(ROWS)
    assert text.count("the rule knows no attention") == 1
    assert text.index("41.8%") < text.index("¹ no biases")
    assert "seconds per step²" in text


@pytest.mark.parametrize(
    ("row", "ratio"),
    [
        (QuantityRow("", "count", count=124_475_904, meter=124_475_904), "exact"),
        (QuantityRow("", "bytes", count=403_000_000, meter=403_000_000.0), "exact"),
        (QuantityRow("", "bytes", count=403_000_000, meter=403_000_001), "1.0000"),
        (QuantityRow("", "bytes", count=1000, meter=999), "0.9990"),
        (QuantityRow("", "bytes", count=1000, meter=973), "0.973"),
        (QuantityRow("", "seconds", count=0.4, meter=0.4), "1.0000"),
        (QuantityRow("", "seconds", count=0.04, meter=1.0), "25.0"),
        (QuantityRow("", "seconds", count=1000, meter=1), "0.00100"),
        (QuantityRow("", "count", count=0, meter=0), "exact"),
        (QuantityRow("", "count", count=0, meter=3), "–"),
        (QuantityRow("", "count", count=3), "–"),
        (QuantityRow("", "count", rule=3, meter=3), "–"),
    ],
)
def test_ratios_say_exact_only_of_equal_whole_numbers(row, ratio):
    assert format_ratio(row) == ratio


@pytest.mark.parametrize(
    ("value", "unit", "figure"),
    [
        (70_553_706_496, "count", "70,553,706,496"),
        (15e12, "count", "15.0 T"),
        (12.5, "count", "12.5"),
        (0, "bytes", "0 B"),
        (141e9, "bytes", "141 GB"),
        (2.916e11, "FLOP", "292 GFLOP"),
        (989.5e12, "FLOP/s", "990 TFLOP/s"),
        (151, "seconds", "2 min 31 s"),
        (0.0123, "share", "1.23%"),
        (1, "share", "100%"),
        (0.09999, "share", "10.0%"),
        (12.5, "share", "1250%"),
        (0.00001234, "share", "0.00123%"),
        (0, "share", "0%"),
        (None, "FLOP", "–"),
    ],
)
def test_figures_have_three_digits_and_their_unit(value, unit, figure):
    assert format_figure(value, unit) == figure
