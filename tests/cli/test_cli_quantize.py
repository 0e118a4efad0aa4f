import hashlib
import json
from pathlib import Path

import pytest

from cli.conftest import Napkin
from napkin.errors import CorruptFile
from napkin.inference.loaded_model import load


def quantize(napkin: Napkin, *options: str) -> dict:
    done = napkin("quantize", "runs/tiny", "--json", *options)
    assert done.status == 0, done.err
    return json.loads(done.out)


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_a_quantized_run_is_read_and_costs_what_was_said(napkin: Napkin, place: Path, to: str) -> None:
    said = quantize(napkin, "--to", to, "--group-size", "16", "--evaluation-tokens", "300")
    folder = Path(said["folder"])
    assert folder == Path(f"runs/tiny-{to}")
    assert {path.name for path in folder.iterdir()} == {
        "model.safetensors",
        "quantized.json",
        "recipe.toml",
        "tokenizer.json",
    }
    assert said["bytes"] == (folder / "model.safetensors").stat().st_size
    original, quantized = load("runs/tiny"), load(folder)
    assert original.sampled_bits_per_byte(300) == (said["original_bits_per_byte"], said["tokens"])
    assert quantized.sampled_bits_per_byte(300) == (said["bits_per_byte"], said["tokens"])
    assert 0 < abs(said["bits_per_byte"] / said["original_bits_per_byte"] - 1) < 0.1
    assert quantized.step == original.step
    assert load(folder).generate("the", max_new_tokens=9) == quantized.generate("the", max_new_tokens=9)
    assert napkin("generate", str(folder), "--tokens", "9", "--save").status == 0
    assert "this model" in napkin("evaluate", str(folder)).out
    for command in (
        ("quantize", str(folder)),
        ("export", str(folder), "--out", "x"),
        ("quantize", "runs/tiny", "--to", to),
    ):
        refused = napkin(*command)
        assert refused.status == 2
        assert len(refused.err.splitlines()) == 1


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_integers_are_chosen_by_what_layers_read(napkin: Napkin, place: Path, method: str) -> None:
    done = napkin("quantize", "runs/tiny", "--method", method, "--group-size", "16", "--calibration-tokens", "500")
    assert done.status == 0, done.err
    assert f"{method} in " in done.out
    folder = Path(f"runs/tiny-int4-{method}")
    assert load(folder).generate("the", max_new_tokens=9)
    said = quantize(
        napkin, "--method", method, "--calibration-text", "one.txt", "--evaluation-tokens", "300", "--out", "of-text"
    )
    assert said["method"] == method
    assert load("of-text").sampled_bits_per_byte(300) == (said["bits_per_byte"], said["tokens"])
    for wrong, complaint in (
        (("--to", "int8"), "is of int4"),
        (("--calibration-tokens", "0"), "--calibration-tokens is 0"),
        (("--calibration-text", "missing.txt"), "missing.txt"),
    ):
        refused = napkin("quantize", "runs/tiny", "--method", method, "--out", "new", *wrong)
        assert (refused.status, complaint in refused.err) == (2, True), refused.err


def test_what_it_costs_is_a_table_before_the_folder_is_named(napkin: Napkin, place: Path) -> None:
    done = napkin("quantize", "runs/tiny", "--to", "int4", "--group-size", "16", "--out", "new/folder")
    assert done.status == 0, done.err
    assert done.out.index("bits per byte") < done.out.index("wrote new/folder")
    assert napkin("quantize", "runs/tiny", "--group-size", "7", "--out", "another").status == 2
    assert not Path("another").exists()


def test_a_damaged_file_is_refused_by_name(napkin: Napkin, place: Path) -> None:
    folder = Path(quantize(napkin, "--to", "int8", "--evaluation-tokens", "0")["folder"])
    for name in ("model.safetensors", "recipe.toml", "tokenizer.json", "quantized.json"):
        data = (folder / name).read_bytes()
        changed = bytearray(data)
        changed[len(data) // 2] ^= 1
        for wrong in (bytes(changed), data[: len(data) // 2], b""):
            (folder / name).write_bytes(wrong)
            with pytest.raises(CorruptFile, match=name.replace(".", r"\.")):
                load(folder)
        (folder / name).write_bytes(data)
    # With checksums of its own, a file of another shape is refused by its tensors.
    about = json.loads((folder / "quantized.json").read_text())
    recipe = (folder / "recipe.toml").read_text().replace("d_model = 16", "d_model = 32")
    (folder / "recipe.toml").write_text(recipe)
    about["checksums"]["recipe.toml"] = hashlib.sha256(recipe.encode()).hexdigest()
    about.pop(next(reversed(about)))
    (folder / "quantized.json").write_text(json.dumps(about))
    with pytest.raises(CorruptFile, match=r"fit.*recipe"):
        _ = load(folder).model
