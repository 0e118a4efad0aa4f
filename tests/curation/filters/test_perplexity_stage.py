"""Documents are kept by their bits per byte, which are the model's."""

from pathlib import Path

import pytest

from napkin.curation.filters import Perplexity
from napkin.curation.registry import make_stage
from napkin.curation.stage import Dropped, Record
from napkin.errors import NapkinError
from napkin.evaluation.ngrams import train_ngrams

WANTED = [f"The proof of theorem {i} follows by induction on the length of the word." for i in range(30)]


def test_what_is_unlike_the_training_text_has_many_bits(tmp_path: Path) -> None:
    model = train_ngrams(WANTED[::2], 4)
    model.save(tmp_path / "model")
    stage = Perplexity(str(tmp_path / "model"), min_bits=0.01, max_bits=3.0)
    assert stage == make_stage("perplexity", {"model": str(tmp_path / "model"), "min_bits": 0.01, "max_bits": 3.0})
    record = Record(identity="a", text=WANTED[1])
    kept = stage.apply(record)
    assert isinstance(kept, Record)
    assert kept.fields["bits_per_byte"] == pytest.approx(model.bits_per_byte([WANTED[1]]), abs=1e-6)
    noise = stage.apply(Record(identity="b", text="xq#7 zz!! kjw 0f9a qqqp"))
    assert isinstance(noise, Dropped)
    assert noise.rule == "high bits_per_byte"
    assert isinstance(stage.apply(Record(identity="c", text="")), Dropped)


def test_wrong_options_and_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NapkinError, match="max_bits is -1"):
        make_stage("perplexity", {"model": "m", "max_bits": -1.0})
    with pytest.raises(NapkinError, match="cannot be read"):
        Perplexity(str(tmp_path / "none")).apply(Record(identity="a", text="x"))
