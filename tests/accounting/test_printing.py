import msgspec
import pytest
import torch
from torch import nn

from napkin import Ledger, count
from napkin.accounting.metering import meter, meter_step
from napkin.accounting.pricing import Price, Spent, price
from napkin.accounting.quantities import QuantityRow, QuantityTable
from napkin.hardware.ceilings import CatalogueCeilings
from napkin.hardware.device_file import find_device
from napkin.units import format_flops

ROWS = [
    QuantityRow("parameters", "count", 1000, 1024, 1024, "no <norms> & no positions"),
    QuantityRow("peak bytes", "bytes", 16_000, 20_000, 21_000, "no activations"),
    QuantityRow("seconds per step", "seconds", None, 0.5, None, "no activations"),
]


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    layer = nn.TransformerEncoderLayer(d_model=64, nhead=4, dim_feedforward=128, batch_first=True)
    return count(layer, torch.zeros(2, 32, 64), optimizer=torch.optim.AdamW)


def test_a_ledger_prints_as_a_few_lines(ledger: Ledger) -> None:
    heading, flops, elementwise, peak = repr(ledger).splitlines()
    assert heading.startswith(f"Ledger: {ledger.parameters:,} parameters; {len(ledger.rows)} operator calls")
    assert "forward" in flops
    assert "backward" in flops
    assert elementwise.split()[0] == "elementwise"
    assert format_flops(ledger.elementwise_flops) in elementwise
    assert "activations" in peak
    assert "optimizer state" in peak
    assert max(map(len, repr(ledger).splitlines())) < 160


def test_a_ledger_names_the_operators_that_it_knows_nothing_of() -> None:
    unknown = Ledger((), 0, 0, 0, {}, (), {"own::<b>": 3}, reserved_bytes=2 * 10**6)
    assert repr(unknown).splitlines() == [
        "Ledger: 0 parameters; 0 operator calls, 0 of them contractions",
        "  FLOPs              0 FLOP",
        "  peak bytes         0 B",
        "  reserved bytes     2.00 MB",
        "  unknown operators  own::<b> (3 ×): their FLOPs are missing",
    ]
    assert "own::&lt;b&gt;" in unknown._repr_html_()
    assert "<b>" not in unknown._repr_html_()


def test_a_price_a_metered_step_and_a_metered_loop_print_as_a_few_lines(ledger: Ledger) -> None:
    model = nn.Linear(8, 8)
    step = meter_step(model, lambda: model(torch.zeros(2, 8)).sum().backward())
    with meter(model) as loop:
        pass
    priced = price(ledger, CatalogueCeilings(find_device("H100")))
    for value, name in ((priced, "Price"), (step, "StepMeasurement"), (loop, "MeteredLoop")):
        lines = repr(value).splitlines()
        assert lines[0].startswith(f"{name}: ")
        assert len(lines) <= 6
        assert max(map(len, lines)) < 200
        assert value._repr_html_().count("<tr>") == len(lines) - 1
    nothing = Price(0.0, 0.0, {}, {}, {"": Spent(0.0, 0.0)}, 3.0)
    assert "none of the time" in repr(nothing)


def test_a_table_of_quantities_is_a_list_that_prints_as_a_table() -> None:
    table = QuantityTable(ROWS)
    assert table == ROWS
    assert str(table).splitlines() == [
        "quantity              rule    count    meter  meter/count",
        "parameters¹          1,000    1,024    1,024        exact",
        "peak bytes²        16.0 kB  20.0 kB  21.0 kB         1.05",
        "seconds per step²        –   500 ms        –            –",
        "¹ no <norms> & no positions",
        "² no activations",
    ]
    assert msgspec.json.encode(table) == msgspec.json.encode(ROWS)


def test_a_table_without_a_meter_has_no_column_for_it() -> None:
    assert repr(QuantityTable([QuantityRow("parameters", "count", 1, 2)])).split() == [
        *("quantity", "rule", "count"),
        *("parameters", "1", "2"),
    ]


def test_a_table_in_a_notebook_is_escaped() -> None:
    html = QuantityTable(ROWS)._repr_html_()
    assert html.count("<tr>") == 4
    assert "no &lt;norms&gt; &amp; no positions" in html
    assert "<norms>" not in html
