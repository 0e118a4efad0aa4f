import msgspec
import pytest

from napkin.accounting.quantities import QuantityRow


def test_a_row_survives_json_with_its_integers_exact():
    row = QuantityRow("parameters", "count", rule=1.5e9, count=2**53 + 1, meter=2**53 + 1, note="N")
    assert msgspec.json.decode(msgspec.json.encode(row), type=QuantityRow) == row


def test_integers_that_differ_beyond_the_precision_of_floats_are_not_exact():
    assert QuantityRow("FLOPs", "FLOP", count=2**60, meter=2**60).exact
    assert not QuantityRow("FLOPs", "FLOP", count=2**60, meter=2**60 + 1).exact


def test_a_row_without_a_meter_is_neither_exact_nor_has_it_a_ratio():
    row = QuantityRow("FLOPs", "FLOP", rule=6, count=6)
    assert not row.exact
    assert row.meter_over_count is None


@pytest.mark.parametrize("text", [b'{"quantity": "x", "unit": "miles"}', b'{"unit": "FLOP"}', b'{"quantity": 3}'])
def test_a_row_of_another_unit_or_without_a_name_is_refused(text):
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=QuantityRow)
