"""`napkin prune`, and its model in everything that takes one."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from cli.conftest import Napkin
from napkin.data.token_file import TokenFile
from napkin.evaluation.text_windows import cut_documents, documents_of_texts, documents_of_tokens
from napkin.inference.loaded_model import load
from napkin.planning.services.replica import count_work


def prune(napkin: Napkin, *options: str) -> dict[str, Any]:
    done = napkin("prune", "runs/tiny", "--json", "--calibration-tokens", "200", "--evaluation-tokens", "300", *options)
    assert done.status == 0, done.err
    return json.loads(done.out)


def test_a_pruned_model_takes_what_was_said_and_is_opened_by_all(napkin: Napkin, place: Path) -> None:
    said = prune(napkin, "--n-kv-heads", "1", "--d-ff", "20")
    folder = Path(said["folder"])
    assert folder == Path("runs/tiny-pruned")
    tensors = load_file(folder / "model.safetensors")
    assert said["after"]["parameters"] == sum(each.numel() for each in tensors.values())
    assert said["after"]["weight_bytes"] == sum(each.nbytes for each in tensors.values())
    assert said["bytes"] == sum(each.stat().st_size for each in folder.iterdir())
    smaller, run = load(folder), load("runs/tiny")
    assert (smaller.config.n_heads, smaller.config.resolved_head_dim, smaller.config.resolved_d_ff) == (1, 8, 20)
    for model, figures in ((run, said["before"]), (smaller, said["after"])):
        work = count_work(model.config)
        assert figures["flops_per_token"] == work.decode_flops(1, figures["tokens_in_cache"] + 1)
        assert figures["parameters"] == model.n_parameters
    assert said["kept"]["layers"] == [0]
    assert len(said["kept"]["hidden_units"]["0"]) == 20
    # The same tokens, opened again.
    assert smaller.tokenizer.fingerprint == run.tokenizer.fingerprint
    again = napkin("evaluate", "text", str(folder), "--tokens", "data/validation.tokens", "--json")
    assert again.status == 0, again.err
    assert set(said["bits"]) == {"before", "after", "random"}
    assert napkin("generate", str(folder), "the", "--tokens", "5").status == 0
    assert napkin("export", str(folder), "--out", "smaller.gguf", "--to", "q8_0").status == 0
    assert load("smaller.gguf").generate("Document", max_new_tokens=5)
    assert napkin("export", "runs/tiny", "--out", "whole.gguf", "--to", "f32").status == 0
    done = napkin(
        *("tune", "distill", "--tuning.start", str(folder), "--distillation.teacher", "whole.gguf"),
        *("--data.train", "data/train.tokens", "--run", "runs/recovered", "--training.steps", "2"),
        *("--training.batch-size", "2", "--tuning.max-length", "16"),
    )
    assert done.status == 0, done.err
    assert load("runs/recovered").config.resolved_d_ff == 20
    assert napkin("prune", "runs/tiny", "--d-ff", "8").status == 2
    assert napkin("prune", str(folder), "--d-ff", "8", "--calibration-text", "docs", "--by", "taylor").status == 0


def test_a_narrower_model_takes_what_was_said(napkin: Napkin, place: Path) -> None:
    said = prune(napkin, "--d-model", "12", "--d-ff", "20")
    tensors = load_file(Path(said["folder"]) / "model.safetensors")
    assert said["after"]["parameters"] == sum(each.numel() for each in tensors.values())
    assert len(said["kept"]["channels"]) == said["after"]["d_model"] == 12
    smaller = load(said["folder"])
    assert (smaller.config.d_model, smaller.config.resolved_head_dim) == (12, 8)
    figures = said["after"]
    assert figures["flops_per_token"] == count_work(smaller.config).decode_flops(1, figures["tokens_in_cache"] + 1)
    assert napkin("generate", said["folder"], "the", "--tokens", "5").status == 0
    assert napkin("export", said["folder"], "--out", "narrow.gguf", "--to", "f16").status == 0
    narrow = load("narrow.gguf")
    assert narrow.config.norm_eps == pytest.approx(load("runs/tiny").config.norm_eps * 16 / 12)


def test_what_is_said_stands_in_a_table(napkin: Napkin, place: Path) -> None:
    done = napkin("prune", "runs/tiny", "--d-ff", "20", "--calibration-tokens", "200", "--evaluation-tokens", "300")
    assert done.status == 0, done.err
    rows = [line.split("  ")[0].strip() for line in done.out.splitlines()]
    assert "the same, parts kept at random" in rows
    assert "wrote runs/tiny-pruned: " in done.out
    silent = napkin("prune", "runs/tiny", "--d-ff", "20", "--evaluation-tokens", "0", "--out", "other")
    assert silent.status == 0
    assert "bits per byte are not measured" in silent.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("runs/tiny", "nothing is to be removed"),
        ("runs/tiny --n-layers 2", "n_layers is 2, the model has 1"),
        ("runs/tiny --d-model 17", "d_model is 17, the model has 16"),
        ("runs/tiny --d-ff 8 --window 1", "--window is 1: use 2 or more"),
        ("runs/tiny --d-ff 8 --calibration-tokens 0", "--calibration-tokens is 0"),
        ("runs/tiny --d-ff 8 --evaluation-tokens -1", "--evaluation-tokens is -1"),
        ("runs/tiny --d-ff 8 --calibration-text missing", "missing"),
        ("runs/tiny --d-ff 8 --out docs", "'docs' exists and is not overwritten"),
        ("missing --d-ff 8", "missing"),
    ],
)
def test_what_cannot_be_pruned_is_refused(place: Path, refusal: Any, arguments: str, complaint: str) -> None:
    assert complaint in refusal("prune", *arguments.split())


def test_a_quantized_run_is_refused_and_a_model_that_no_folder_holds(napkin: Napkin, place: Path, refusal: Any) -> None:
    assert napkin("quantize", "runs/tiny", "--to", "int8", "--evaluation-tokens", "0").status == 0
    assert "'runs/tiny'" in refusal("prune", "runs/tiny-int8", "--d-ff", "8")


def test_cut_documents_have_the_same_text(place: Path) -> None:
    tokenizer = load("runs/tiny").tokenizer
    whole = documents_of_tokens(TokenFile.open("data/validation.tokens"), tokenizer)
    texts = documents_of_texts(["one", "a longer text than the other one, by far"], tokenizer)
    for documents in (whole, texts):
        cut = cut_documents(documents, 7)
        lengths = cut.ends - cut.starts
        assert lengths.max() == 7
        assert lengths.sum() == len(documents.ids) == cut.ends[-1]
        assert set(documents.ends) <= set(cut.ends)
        assert cut.surplus.sum() == documents.surplus.sum()
        assert len(cut.ends) == sum(-(-int(n) // 7) for n in documents.ends - documents.starts)
