import dataclasses
import math
import random
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from napkin.checkpoint.folder import checkpoint_bytes, checkpoint_paths, read_checkpoint
from napkin.checkpoint.restore import load_averaged_model, load_train_state
from napkin.checkpoint.state import Snapshot, snapshot
from napkin.checkpoint.writer import CheckpointWriter, write_checkpoint
from napkin.errors import NapkinError
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig
from napkin.runs.metrics import History
from napkin.train_step.step import TrainState, build_train_state
from napkin.train_step.step_ledger import count_step
from oracles.tiny_run import MODEL, TRAINING


def make_learner(average_decay: float | None = None) -> TrainState:
    recipe = Recipe(
        model=dataclasses.replace(MODEL, vocab_size=17),
        optimizer=OptimizerConfig(warmup_steps=0, average_decay=average_decay),
        training=dataclasses.replace(TRAINING, precision="fp32"),
    )
    return build_train_state(ResolvedRecipe(recipe, Precision("fp32", "cpu")))


def learn(train_state: TrainState, first: int, last: int) -> list[float]:
    losses = []
    for number in range(first, last):
        tokens = torch.randint(0, 17, (4, 33), generator=torch.Generator().manual_seed(number))
        losses.append(train_state.step(number, tokens[:, :-1], tokens[:, 1:])[0].item())
    return losses


def taken(train_state: TrainState, step: int, **history: object) -> Snapshot:
    kept = History(**history)  # pyright: ignore[reportArgumentType]
    return snapshot(train_state, step=step, seconds=1.0, tokenizer="t", train_tokens="d", history=kept)


def writer_in(folder: Path, **settings: object) -> CheckpointWriter:
    defaults = {"background": True, "keep": 2, "keep_best": True}
    return CheckpointWriter(folder, **(defaults | settings))  # pyright: ignore[reportArgumentType]


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in checkpoint_paths(folder))


def test_training_goes_on_while_a_checkpoint_of_an_earlier_state_is_written(tmp_path: Path) -> None:
    train_state, go_on = make_learner(0.9), threading.Event()
    learn(train_state, 0, 2)
    (tmp_path / "expected").mkdir()
    expected = write_checkpoint(tmp_path / "expected", taken(train_state, 2)).path
    with writer_in(tmp_path, before_publishing=lambda: go_on.wait(300)) as writer:
        writer.save(taken(train_state, 2))
        learn(train_state, 2, 5)
        assert steps(tmp_path) == []
        go_on.set()
        written = writer.wait()
    assert written is not None
    for name in ("model.safetensors", "optimizer.safetensors", "state.json", "SHA256SUMS"):
        assert (written.path / name).read_bytes() == (expected / name).read_bytes()


def test_one_checkpoint_is_written_at_a_time_from_memory_that_is_made_once(tmp_path: Path) -> None:
    train_state, go_on, second = make_learner(), threading.Event(), threading.Event()
    writer = writer_in(tmp_path, before_publishing=lambda: go_on.wait(300))
    writer.save(taken(train_state, 1))
    addresses = [buffer.data_ptr() for buffer in writer._buffers._buffers.values()]

    def save_another() -> None:
        writer.save(taken(train_state, 2))
        second.set()

    thread = threading.Thread(target=save_another)
    thread.start()
    assert not second.wait(0.1)
    go_on.set()
    thread.join(60)
    assert second.is_set()
    writer.wait()
    assert steps(tmp_path) == [1, 2]
    assert [buffer.data_ptr() for buffer in writer._buffers._buffers.values()] == addresses


def test_what_the_writer_met_is_told_at_the_next_step_and_once(tmp_path: Path) -> None:
    train_state = make_learner()
    with writer_in(tmp_path / "checkpoints") as writer:
        writer.refuse_failure()
        # The folder is not there.
        writer.save(taken(train_state, 1))
        assert writer._thread is not None
        writer._thread.join()
        with pytest.raises(NapkinError, match="step-00000001' cannot be written"):
            writer.refuse_failure()
        writer.refuse_failure()


def test_leaving_waits_for_the_write_and_tells_its_error_before_another(tmp_path: Path) -> None:
    def save_and_meet(folder: Path, error: Exception | None) -> None:
        with writer_in(folder) as writer:
            writer.save(taken(make_learner(), 1))
            if error is not None:
                raise error

    for error in (None, NapkinError("what came of it later")):
        with pytest.raises(NapkinError, match="step-00000001"):
            save_and_meet(tmp_path / "missing", error)
    with pytest.raises(ZeroDivisionError):
        save_and_meet(tmp_path, ZeroDivisionError())
    assert read_checkpoint(tmp_path / "step-00000001").state.step == 1


def test_the_best_checkpoint_is_kept_besides_the_newest_and_found_again(tmp_path: Path) -> None:
    train_state = make_learner()
    losses: list[tuple[int, float]] = []
    # By two processes, as it were; steps 3 and 6 are not evaluated, 4's loss is known to its successors alone.
    for process in (range(1, 5), range(5, 9)):
        with writer_in(tmp_path) as writer:
            for step in process:
                saved_before = list(losses)
                if step not in (3, 6):
                    losses.append((step, {2: 1.0, 7: 0.9}.get(step, 2.0 + step)))
                writer.save(taken(train_state, step, validation_losses=saved_before if step == 4 else losses))
        if process.stop == 5:
            assert steps(tmp_path) == [2, 3, 4]
    assert steps(tmp_path) == [7, 8]
    with writer_in(tmp_path, keep=1) as writer:
        writer.save(taken(train_state, 9, validation_losses=losses))
    assert steps(tmp_path) == [7, 9]
    with writer_in(tmp_path, keep=1, keep_best=False) as writer:
        writer.save(taken(train_state, 10, validation_losses=losses))
    assert steps(tmp_path) == [10]


def test_a_step_being_written_is_not_written_again_and_damage_calls_for_a_new_best(tmp_path: Path) -> None:
    train_state, go_on = make_learner(), threading.Event()
    losses = [(1, 2.0), (2, 1.0)]
    with writer_in(tmp_path, before_publishing=lambda: go_on.wait(300)) as writer:
        assert writer.lacks(2, History(validation_losses=losses))
        writer.save(taken(train_state, 2, validation_losses=losses))
        # Nothing of it is on the disk yet.
        assert steps(tmp_path) == []
        assert not writer.lacks(3, History(validation_losses=[*losses, (3, 1.5)]))
        assert writer.lacks(3, History(validation_losses=[*losses, (3, 0.5)]))
        go_on.set()
    shutil.rmtree(tmp_path / "step-00000002")
    assert writer_in(tmp_path).lacks(4, History(validation_losses=[*losses, (4, 1.5)]))
    assert not writer_in(tmp_path, keep_best=False).lacks(4, History(validation_losses=[*losses, (4, 0.1)]))
    assert not writer_in(tmp_path).lacks(4, History(validation_losses=[*losses, (4, math.nan)]))


def test_few_of_the_evaluations_around_a_plateau_bring_a_checkpoint(tmp_path: Path) -> None:
    train_state, draw, losses, saved = make_learner(), random.Random(5), [], []
    n = 1000
    with writer_in(tmp_path, background=False) as writer:
        for step in range(1, n + 1):
            losses.append((step, draw.gauss(3.0, 0.01)))
            if writer.lacks(step, History(validation_losses=losses)):
                saved.append(step)
                writer.save(taken(train_state, step, validation_losses=losses))
    best = min(losses, key=lambda entry: entry[1])[0]
    assert saved[-1] == best
    assert steps(tmp_path) == saved[-2:]
    # Records of independent draws: 7.5 are expected of 1,000, with a standard deviation of 2.4.
    assert saved == [step for step, loss in losses if loss == min(earlier for _, earlier in losses[:step])]
    assert len(saved) <= math.log(n) + 0.58 + 3 * 2.4


@pytest.mark.parametrize("background", [True, False])
def test_a_disk_without_room_is_named_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    train_state = make_learner()
    (tmp_path / "checkpoints").mkdir()
    with writer_in(tmp_path / "checkpoints", background=background) as writer:
        writer.save(taken(train_state, 1))
        writer.wait()
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=taken(train_state, 2).bytes))
        with pytest.raises(NapkinError, match=r"checkpoint.* free: make.*are"):
            writer.save(taken(train_state, 2))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("average_decay", [None, 0.9])
def test_the_bytes_of_a_checkpoint_are_those_that_were_counted(tmp_path: Path, average_decay: float | None) -> None:
    train_state = make_learner(average_decay)
    written = write_checkpoint(tmp_path, taken(train_state, 0)).path
    tensors = sum(part.tensor.nbytes for part in taken(train_state, 0).parts())
    assert checkpoint_bytes(count_step(ResolvedRecipe(train_state.recipe, train_state.precision))) == tensors
    on_disk = sum((written / name).stat().st_size for name in ("model.safetensors", "optimizer.safetensors"))
    assert tensors < on_disk < tensors + 2**13


def test_averaged_weights_survive_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    train_state, resumed = make_learner(0.9), make_learner(0.9)
    learn(train_state, 0, 4)
    checkpoint = write_checkpoint(tmp_path, taken(train_state, 4))
    load_train_state(checkpoint, resumed)
    assert learn(resumed, 4, 9) == learn(train_state, 4, 9)
    assert train_state.average is not None
    assert resumed.average is not None
    assert resumed.average.step == 9
    for found, expected in zip(resumed.average.averages, train_state.average.averages, strict=True):
        assert torch.equal(found, expected)


def test_averaged_weights_are_what_a_trained_model_is_opened_with(tmp_path: Path) -> None:
    train_state = make_learner(0.9)
    learn(train_state, 0, 4)
    checkpoint = write_checkpoint(tmp_path, taken(train_state, 4))
    opened = make_learner().model
    load_averaged_model(checkpoint, opened)
    assert train_state.average is not None
    for parameter, average in zip(opened.parameters(), train_state.average.averages, strict=True):
        assert torch.equal(parameter, average)
    plain = make_learner()
    learn(plain, 0, 1)
    load_averaged_model(write_checkpoint(tmp_path, taken(plain, 1)), opened)
    for parameter, expected in zip(opened.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(parameter, expected)


def test_an_average_that_is_asked_for_later_begins_there_and_one_that_is_not_wanted_is_dropped(tmp_path: Path) -> None:
    train_state, later = make_learner(), make_learner(0.9)
    learn(train_state, 0, 3)
    load_train_state(write_checkpoint(tmp_path, taken(train_state, 3)), later)
    assert later.average is not None
    assert later.average.step == 0
    for parameter, average in zip(train_state.model.parameters(), later.average.averages, strict=True):
        assert torch.equal(parameter, average)
    learn(later, 3, 5)
    dropped = make_learner()
    load_train_state(write_checkpoint(tmp_path, taken(later, 5)), dropped)
    assert learn(dropped, 5, 7) == learn(later, 5, 7)


def test_an_average_is_counted_with_the_step_that_makes_it() -> None:
    plain, averaged = (
        count_step(ResolvedRecipe(make_learner(decay).recipe, Precision("fp32", "cpu"))) for decay in (None, 0.9)
    )
    more = {
        category: averaged.peak_by_category[category] - plain.peak_by_category[category]
        for category in ("parameters", "gradients", "optimizer state")
    }
    assert more == {"parameters": 0, "gradients": 0, "optimizer state": 4 * plain.parameters}
    rows = [row.operator for row in averaged.rows if row.phase == "optimizer"]
    assert any("lerp" in operator for operator in rows)
