"""Runs that learn from a teacher, beside it or from a file: their gradient, their books, and their resumption."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div

from napkin.chats.token_sequence import TokenSequence
from napkin.data.token_file import TokenFile
from napkin.errors import CorruptFile, NapkinError
from napkin.inference.loaded_model import load
from napkin.model.transformer import Transformer
from napkin.recipe.tuning_recipe import DistillationConfig, DistillationRecipe
from napkin.runs.metrics import read_metrics
from napkin.training.run import open_run, train, train_run
from napkin.tuning.distillation_method import DistillationObjective, FileTeacher, ModelTeacher, TokenWindows, teach
from napkin.tuning.method import tune
from napkin.tuning.packing import micro_batches_of
from napkin.tuning.sequence_step import normalised_sum, totals_of, with_known_coefficients
from napkin.tuning.teacher_file import TaughtExamples, TeacherFile, TeacherKey, file_bytes, write_teacher_file
from oracles.tiny_run import tiny_recipe
from oracles.tiny_tuning import make_start, tuning_recipe, write_conversations


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("distillation")
    make_start(path)
    recipe = tiny_recipe(path, steps=3)
    wide = dataclasses.replace(recipe.model, d_model=2 * recipe.model.d_model, d_ff=None)
    train(dataclasses.replace(recipe, model=wide), path / "teacher")
    write_conversations(path / "train.jsonl", 10)
    write_conversations(path / "held_out.jsonl", 5, seed=1)
    return path


def recipe_of(
    folder: Path, teacher: str, *, tuning: Any = None, weight: float = 0.5, **training: Any
) -> DistillationRecipe:
    recipe = tuning_recipe(folder, "distill", tuning=tuning, **training)
    assert isinstance(recipe, DistillationRecipe)
    return dataclasses.replace(recipe, distillation=DistillationConfig(teacher, weight=weight, temperature=2.0))


def examples(model: Transformer, n: int = 9) -> list[tuple[TokenSequence]]:
    generator = np.random.default_rng(3)
    found = []
    for _ in range(n):
        length = int(generator.integers(3, 14))
        mask = generator.random(length) < 0.6
        mask[0], mask[-1] = False, True
        found.append((TokenSequence(generator.integers(0, model.config.vocab_size, length), mask),))
    return found


def gradients(model: Transformer, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("kind", ["beside", "file"])
def test_the_gradient_of_packed_rows_is_that_of_torch_on_each_sequence_alone(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    student, teacher = load(folder / "start").model.double(), load(folder / "teacher").model
    given, weight, temperature, all_tokens = examples(student), 0.3, 2.0, teacher.config.vocab_size
    if kind == "file":
        # All tokens are kept: the coarse divergence is the whole one.
        key = TeacherKey("", "", "", temperature)
        write_teacher_file(tmp_path / "kept", teacher, given, key, top_k=all_tokens, max_tokens=16)
        file = TeacherFile.open(tmp_path / "kept", vocab_size=all_tokens)
        held: Any = FileTeacher(all_tokens, file)
        taught: Any = TaughtExamples(given, file)
    else:
        held, taught = ModelTeacher(teacher.config), given
        held.model = teacher.double()
    objective = DistillationObjective(held, weight, temperature, "sequence")
    parts = micro_batches_of(taught, max_tokens=24, row_length=student.config.context_length)
    assert len(parts) > 2
    totals = totals_of(parts)
    total = torch.zeros(())
    for part in with_known_coefficients(parts, objective, totals):
        rows = part.rows
        assert rows.teacher is not None
        scores = student.token_scores(
            rows.inputs, rows.places, rows.targets, rows.documents, rows.coefficients, rows.teacher(rows)
        )
        total = total + objective.loss(part, scores, totals)[0]
        with torch.no_grad():
            scores = student.token_scores(
                rows.inputs, rows.places, rows.targets, rows.documents, None, rows.teacher(rows)
            )
            assert objective.loss(part, scores, totals)[0] == pytest.approx(
                float(normalised_sum(_terms(scores, weight, temperature), part, totals, "sequence")), rel=1e-6
            )
    found = gradients(student, total)
    expected = torch.zeros(())
    teacher = teacher.double()
    for (sequence,) in given:
        ids, mask = torch.tensor(sequence.tokens)[None], torch.tensor(sequence.loss_mask)[1:]
        logits, targets = student(ids)[0, :-1][mask], ids[0, 1:][mask]
        with torch.no_grad():
            p = (teacher(ids)[0, :-1][mask] / temperature).softmax(-1)
        divergences = kl_div((logits / temperature).log_softmax(-1), p, reduction="batchmean")
        mean = (1 - weight) * cross_entropy(logits, targets) + weight * temperature**2 * divergences
        expected = expected + mean / len(given)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-7)
    for name, gradient in gradients(student, expected).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def _terms(scores: Any, weight: float, temperature: float) -> torch.Tensor:
    return weight * temperature**2 * scores.divergences - (1 - weight) * scores.log_probabilities


@pytest.mark.parametrize("kind", ["beside", pytest.param("file", marks=pytest.mark.thorough)])
def test_a_run_is_counted_and_a_resumed_one_ends_with_the_same_bytes(folder: Path, tmp_path: Path, kind: str) -> None:
    recipe = recipe_of(folder, str(folder / "teacher"))
    if kind == "file":
        file = tmp_path / "likeliest"
        teach(recipe, file, top_k=5)
        recipe = recipe_of(folder, str(file))
    outcome = tune(recipe, tmp_path / "whole")
    rows = {row.quantity: row for row in outcome.table}
    assert rows["FLOPs per step"].count == rows["FLOPs per step"].meter
    assert rows["peak bytes"].meter == pytest.approx(rows["peak bytes"].count, rel=0.01)
    plain = tune(tuning_recipe(folder), tmp_path / "plain")
    without = {row.quantity: row for row in plain.table}
    taught = (rows["peak bytes"].count or 0) - (without["peak bytes"].count or 0)
    weights = sum(each.nbytes for each in load(folder / "teacher").model.parameters())
    assert (taught > weights) == (kind == "beside")
    more = (rows["FLOPs per step"].count or 0) - (without["FLOPs per step"].count or 0)
    assert (more > 0) == (kind == "beside")
    lines = list(read_metrics(tmp_path / "whole" / "metrics.jsonl"))
    assert lines[-1].figures is not None
    assert {"divergence", "token loss", "held-out divergence"} <= set(lines[-1].figures)
    known = json.loads((tmp_path / "whole" / "teacher.json").read_text())
    assert known["fingerprint"] == load(folder / "teacher").fingerprint
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step-00000006")
    assert train_run(*open_run(tmp_path / "resumed")).first_step == 3
    name = "checkpoints/step-00000006/model.safetensors"
    assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    # Nobody goes on with another teacher.
    (tmp_path / "resumed" / "teacher.json").write_text(json.dumps({**known, "fingerprint": "other"}))
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step-00000006")
    with pytest.raises(NapkinError, match="has changed since"):
        open_run(tmp_path / "resumed")


@pytest.mark.thorough
def test_a_student_comes_nearer_to_its_teacher_on_windows_of_a_file_of_tokens(folder: Path, tmp_path: Path) -> None:
    tokens = next((folder / "start").parent.rglob("*.tokens"))
    recipe = recipe_of(folder, str(folder / "teacher"), weight=1.0, steps=20)
    data = dataclasses.replace(recipe.data, train=str(tokens), validation=str(tokens))
    tune(dataclasses.replace(recipe, data=data), tmp_path / "run")
    lines = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    first, last = lines[2].figures, lines[-1].figures
    assert first is not None
    assert last is not None
    assert (last["held-out divergence"] or 0) < (first["held-out divergence"] or 0)


def test_windows_hold_each_token_of_a_file_once_as_a_target(folder: Path) -> None:
    file = TokenFile.open(next(folder.rglob("*.tokens")))
    windows = TokenWindows(file, 7)
    learned = np.concatenate([each.tokens[each.loss_mask] for (each,) in windows])
    assert learned.tolist() == file.tokens[1 : 1 + 7 * len(windows)].tolist()
    assert file.n_tokens - 1 - len(learned) < 7


def test_what_is_kept_are_the_likeliest_tokens_and_the_rest(folder: Path, tmp_path: Path) -> None:
    teacher = load(folder / "teacher").model
    given, k, temperature = examples(teacher), 4, 0.7
    path = tmp_path / "kept"
    n = write_teacher_file(path, teacher, given, TeacherKey("of", "by", "print", temperature), top_k=k, max_tokens=20)
    file = TeacherFile.open(path, vocab_size=teacher.config.vocab_size)
    assert path.stat().st_size == file_bytes(n, len(given), k)
    begin = 0
    for (sequence,), end in zip(given, file.ends, strict=True):
        with torch.no_grad():
            logits = teacher(torch.tensor(sequence.tokens)[None])[0, :-1][torch.tensor(sequence.loss_mask)[1:]]
        p = (logits / temperature).softmax(-1)
        values, ids = p.topk(k, dim=-1)
        assert file.ids[begin:end].tolist() == ids.tolist()
        np.testing.assert_allclose(np.exp(file.log_probabilities[begin:end, :-1]), values, rtol=1e-4)
        np.testing.assert_allclose(np.exp(file.log_probabilities[begin:end]).sum(axis=1), 1, rtol=1e-5)
        begin = int(end)
    # One bit of it, wherever, is found.
    content = bytearray(path.read_bytes())
    for place in (9, 5000, len(content) - 1):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises((CorruptFile, NapkinError)):
            TeacherFile.open(path, vocab_size=teacher.config.vocab_size)
    path.unlink()
    with pytest.raises(NapkinError, match="use a smaller --top-k"):
        write_teacher_file(
            path,
            teacher,
            given,
            TeacherKey("", "", "", 1.0),
            top_k=k,
            max_tokens=20,
            most_bytes=file_bytes(n, 9, k) - 1,
        )
    assert not path.exists()


def test_a_file_of_other_examples_or_another_temperature_is_refused(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_of(folder, str(folder / "teacher"))
    teach(recipe, tmp_path / "kept", top_k=3)
    asked = recipe_of(folder, str(tmp_path / "kept"))
    swapped = dataclasses.replace(asked.data, train=asked.data.validation, validation=asked.data.train)
    colder = dataclasses.replace(asked.distillation, temperature=1.0)
    for other, says in (
        (dataclasses.replace(asked, distillation=colder), "computed at temperature 2"),
        (dataclasses.replace(asked, data=swapped), "was made from other examples"),
        (recipe_of(folder, str(folder / "train.jsonl")), "not a file of a teacher"),
        (recipe_of(folder, ""), "no teacher is named"),
    ):
        with pytest.raises(NapkinError, match=says):
            tune(other, tmp_path / "run")
    assert not (tmp_path / "run").exists()
