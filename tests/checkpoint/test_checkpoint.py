import copy
import dataclasses
import json
import random
import re
import subprocess
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from napkin.checkpoint.folder import checkpoint_paths, prune_checkpoints, read_checkpoint
from napkin.checkpoint.restore import load_model, load_train_state, restore_newest
from napkin.checkpoint.state import Checkpoint
from napkin.checkpoint.writer import save_checkpoint
from napkin.errors import CorruptFile, NapkinError
from napkin.model.config import ModelConfig
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig
from napkin.train_step.step import TrainState, build_train_state
from oracles.tiny_run import MODEL, TRAINING

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "SHA256SUMS")


SMALL = dataclasses.replace(MODEL, vocab_size=17)


def make_learner(model: ModelConfig = SMALL, seed: int = 0) -> TrainState:
    training = dataclasses.replace(TRAINING, init_seed=seed, precision="fp32")
    recipe = Recipe(model=model, optimizer=OptimizerConfig(warmup_steps=0), training=training)
    return build_train_state(ResolvedRecipe(recipe, Precision("fp32", "cpu")))


def learn(train_state: TrainState, first: int, last: int) -> list[float]:
    losses = []
    for number in range(first, last):
        tokens = torch.randint(0, 17, (4, 33), generator=torch.Generator().manual_seed(number))
        losses.append(train_state.step(number, tokens[:, :-1], tokens[:, 1:])[0].item())
    return losses


def save(folder: Path, train_state: TrainState, step: int) -> Checkpoint:
    return save_checkpoint(folder, train_state, step=step, seconds=1.5, tokenizer="t", train_tokens="d")


def restore(folder: Path, train_state: TrainState, messages: list[str] | None = None) -> Checkpoint | None:
    tell = (messages if messages is not None else []).append
    return restore_newest(folder, train_state, tokenizer="t", train_tokens="d", on_message=tell)


def tensors(train_state: TrainState) -> dict[str, torch.Tensor]:
    found = {name: parameter.detach().clone() for name, parameter in train_state.model.named_parameters()}
    for name, parameter in train_state.model.named_parameters():
        found |= {f"{moment}.{name}": t.clone() for moment, t in train_state.optimizer.state[parameter].items()}
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture
def two_checkpoints(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder with the checkpoints of steps 2 and 4, and what was saved at step 2."""
    train_state = make_learner()
    learn(train_state, 0, 2)
    save(tmp_path, train_state, 2)
    earlier = tensors(train_state)
    learn(train_state, 2, 4)
    save(tmp_path, train_state, 4)
    return tmp_path, earlier


def rewrite_sums(checkpoint: Path) -> None:
    names = [name for name in FILES if name != "SHA256SUMS"]
    lines = (f"{sha256((checkpoint / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    (checkpoint / "SHA256SUMS").write_text("".join(lines))


def test_a_learner_that_was_saved_and_loaded_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    train_state = make_learner()
    learn(train_state, 0, 3)
    save(tmp_path, train_state, 3)
    other = make_learner(seed=1)
    assert (found := restore(tmp_path, other)) is not None
    assert (found.state.step, found.state.seconds) == (3, 1.5)
    assert_same(tensors(other), tensors(train_state))
    assert learn(other, 3, 8) == learn(train_state, 3, 8)


def test_a_checkpoint_before_the_first_step_is_one_like_others(tmp_path: Path) -> None:
    train_state, other = make_learner(), make_learner(seed=1)
    save(tmp_path, train_state, 0)
    restore(tmp_path, other)
    assert learn(other, 0, 3) == learn(make_learner(), 0, 3)


def test_the_sums_are_those_that_sha256sum_checks(tmp_path: Path) -> None:
    path = save(tmp_path, make_learner(), 0).path
    done = subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=path, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.count(": OK") == 3


def test_a_checkpoint_that_is_there_already_is_kept_as_it_is(tmp_path: Path) -> None:
    save(tmp_path, make_learner(), 0)
    before = (tmp_path / "step-00000000" / "model.safetensors").stat().st_mtime_ns
    save(tmp_path, make_learner(), 0)
    assert (tmp_path / "step-00000000" / "model.safetensors").stat().st_mtime_ns == before


def test_a_damaged_one_at_its_place_is_set_aside_when_a_checkpoint_is_written(tmp_path: Path) -> None:
    train_state = make_learner()
    path = save(tmp_path, train_state, 0).path
    (path / "model.safetensors").write_bytes(b"")
    save(tmp_path, train_state, 0)
    assert read_checkpoint(path).state.step == 0
    assert (tmp_path / "damaged-step-00000000" / "model.safetensors").read_bytes() == b""


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_was_cut_anywhere_is_noticed_and_the_checkpoint_before_it_used(
    two_checkpoints: tuple[Path, dict[str, torch.Tensor]], name: str
) -> None:
    folder, _ = two_checkpoints
    file = folder / "step-00000004" / name
    whole = file.read_bytes()
    draw = random.Random(name)
    for length in [0, len(whole) - 1, *draw.choices(range(len(whole)), k=50)]:
        file.write_bytes(whole[:length])
        newest, before = checkpoint_paths(folder)
        with pytest.raises(CorruptFile):
            read_checkpoint(newest)
        read_checkpoint(before)


@pytest.mark.parametrize("name", FILES)
def test_a_bit_that_flipped_anywhere_is_noticed(
    two_checkpoints: tuple[Path, dict[str, torch.Tensor]], name: str
) -> None:
    folder, _ = two_checkpoints
    file = folder / "step-00000004" / name
    whole = file.read_bytes()
    draw = random.Random(name)
    for _ in range(50):
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        file.write_bytes(flipped)
        with pytest.raises(CorruptFile, match=re.escape(str(folder / "step-00000004"))):
            read_checkpoint(folder / "step-00000004")


@pytest.mark.parametrize("name", FILES)
def test_a_run_goes_on_from_the_checkpoint_before_one_that_lacks_a_file(
    two_checkpoints: tuple[Path, dict[str, torch.Tensor]], name: str
) -> None:
    folder, earlier = two_checkpoints
    (folder / "step-00000004" / name).unlink()
    train_state, messages = make_learner(), []
    found = restore(folder, train_state, messages)
    assert found is not None
    assert found.state.step == 2
    assert_same(tensors(train_state), earlier)
    assert len(messages) == 1
    assert name in messages[0]
    assert "step-00000002" in messages[0]
    assert "\n" not in messages[0]
    assert (folder / "damaged-step-00000004").is_dir()


def test_where_every_checkpoint_is_damaged_none_is_touched_and_nothing_begins_anew(
    two_checkpoints: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    folder, _ = two_checkpoints
    for step in (2, 4):
        (folder / f"step-{step:08d}" / "state.json").unlink()
    with pytest.raises(CorruptFile, match="step-00000004"):
        restore(folder, make_learner())
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000004"]


STATES: list[Callable[[dict], object]] = [
    lambda state: 5,
    lambda state: {},
    lambda state: state | {"format": "other"},
    lambda state: state | {"version": 2},
    lambda state: state | {"unheard_of": 1},
    lambda state: state | {"step": -4},
    lambda state: state | {"step": 10**30},
    lambda state: state | {"step": 4.0},
    lambda state: state | {"step": 2},
    lambda state: state | {"seconds": -1.0},
    lambda state: state | {"seconds": "soon"},
    lambda state: state | {"recipe": {"model": 3}},
]


@pytest.mark.parametrize("number", range(len(STATES)))
def test_a_state_that_makes_no_sense_is_refused_though_its_checksum_is_right(
    two_checkpoints: tuple[Path, dict[str, torch.Tensor]], number: int
) -> None:
    folder, _ = two_checkpoints
    path = folder / "step-00000004"
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(STATES[number](state)))
    rewrite_sums(path)
    with pytest.raises(CorruptFile, match=re.escape("state.json")) as caught:
        read_checkpoint(path)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"[" * 100_000, b'{"step": ' + b"9" * 10_000 + b"}", b"null"])
def test_a_state_that_is_no_json_of_ours_is_refused(
    two_checkpoints: tuple[Path, dict[str, torch.Tensor]], text: bytes
) -> None:
    path = two_checkpoints[0] / "step-00000004"
    (path / "state.json").write_bytes(text)
    rewrite_sums(path)
    with pytest.raises(CorruptFile, match=re.escape("state.json")):
        read_checkpoint(path)


ALTERATIONS: list[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = [
    lambda found: {name: tensor.bfloat16() for name, tensor in found.items()},
    lambda found: {name: tensor.double() for name, tensor in found.items()},
    lambda found: {name: tensor.flatten() for name, tensor in found.items()},
    lambda found: {name: tensor[:1].clone() for name, tensor in found.items()},
    lambda found: dict(list(found.items())[1:]),
    lambda found: found | {"one.more": torch.zeros(3)},
    lambda found: {},
]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("number", range(len(ALTERATIONS)))
def test_tensors_that_do_not_fit_are_refused_though_their_checksum_is_right(
    two_checkpoints: tuple[Path, dict[str, torch.Tensor]], number: int, name: str
) -> None:
    folder, earlier = two_checkpoints
    path = folder / "step-00000004"
    save_file(ALTERATIONS[number](load_file(path / name)), path / name)
    rewrite_sums(path)
    train_state, messages = make_learner(seed=1), []
    found = restore(folder, train_state, messages)
    assert found is not None
    assert found.state.step == 2
    assert_same(tensors(train_state), earlier)
    assert name in messages[0]


@pytest.mark.parametrize("text", [b"", b"\x08" + b"\0" * 15, b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]"])
def test_a_file_that_is_no_safetensors_is_refused_though_its_checksum_is_right(
    two_checkpoints: tuple[Path, dict[str, torch.Tensor]], text: bytes
) -> None:
    folder, earlier = two_checkpoints
    (folder / "step-00000004" / "model.safetensors").write_bytes(text)
    rewrite_sums(folder / "step-00000004")
    train_state = make_learner(seed=1)
    restore(folder, train_state)
    assert_same(tensors(train_state), earlier)


@pytest.mark.parametrize(
    "changes", [{"n_heads": 8, "n_kv_heads": 4, "d_ff": 128}, {"n_layers": 2}, {"rope_theta": 5e3}]
)
def test_another_model_is_refused_by_name_also_where_the_weights_would_fit(tmp_path: Path, changes: dict) -> None:
    checkpoint = save(tmp_path, make_learner(), 0)
    train_state = make_learner(dataclasses.replace(SMALL, **changes))
    before = tensors(train_state)
    for load in (lambda: load_model(checkpoint, train_state.model), lambda: load_train_state(checkpoint, train_state)):
        with pytest.raises(NapkinError) as caught:
            load()
        for name, value in changes.items():
            assert f"model.{name} is {value}, was {getattr(SMALL, name)}" in str(caught.value)
    assert_same(tensors(train_state), before)


@pytest.mark.parametrize(
    ("tokenizer", "train_tokens", "what"), [("other", "d", "tokenizer"), ("t", "other", "training data")]
)
def test_another_text_is_refused(tmp_path: Path, tokenizer: str, train_tokens: str, what: str) -> None:
    save(tmp_path, make_learner(), 0)
    with pytest.raises(NapkinError, match=f"{what}.*: restore"):
        restore_newest(
            tmp_path, make_learner(), tokenizer=tokenizer, train_tokens=train_tokens, on_message=lambda text: None
        )


def test_a_recipe_that_changed_in_other_ways_is_told(tmp_path: Path) -> None:
    train_state = make_learner()
    save(tmp_path, train_state, 0)
    changed = dataclasses.replace(train_state.recipe, optimizer=OptimizerConfig(learning_rate=0.5, warmup_steps=0))
    messages: list[str] = []
    resolved = dataclasses.replace(train_state.resolved, recipe=changed)
    restore(tmp_path, dataclasses.replace(train_state, resolved=resolved), messages)
    assert len(messages) == 1
    assert f"optimizer.learning_rate is 0.5, was {train_state.recipe.optimizer.learning_rate}" in messages[0]


def test_pruning_keeps_the_newest_and_what_is_no_checkpoint(tmp_path: Path) -> None:
    train_state = make_learner()
    for step in (5, 99_999_999, 100_000_000, 7):
        save(tmp_path, train_state, step)
    for name in ("step-of-mine", "damaged-step-00000003", "step-00000001.bak"):
        (tmp_path / name).mkdir()
    (tmp_path / ".step-00000009.0123456789abcdef.tmp").mkdir()
    (tmp_path / ".step-00000009.0123456789abcdef.tmp" / "state.json").touch()
    prune_checkpoints(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "damaged-step-00000003",
        "step-00000001.bak",
        "step-100000000",
        "step-99999999",
        "step-of-mine",
    ]
    assert restore(tmp_path, train_state) == read_checkpoint(tmp_path / "step-100000000")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["weight", "moment"])
def test_no_checkpoint_is_made_of_numbers_that_are_not_finite(tmp_path: Path, where: str, value: float) -> None:
    train_state = make_learner()
    learn(train_state, 0, 1)
    *_, parameter = train_state.model.parameters()
    with torch.no_grad():
        (parameter if where == "weight" else train_state.optimizer.state[parameter]["exp_avg_sq"]).view(-1)[3] = value
    with pytest.raises(NapkinError, match="infinity or NaN"):
        save(tmp_path, train_state, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(NapkinError, match="step-00000000' cannot be written"):
        save(tmp_path / "missing", make_learner(), 0)


def test_files_are_as_readable_as_the_umask_says(tmp_path: Path) -> None:
    path = save(tmp_path, make_learner(), 0).path
    (path / "other").touch()
    assert {file.stat().st_mode for file in path.iterdir()} == {(path / "other").stat().st_mode}


def test_saving_copies_no_tensor(tmp_path: Path) -> None:
    model = ModelConfig(vocab_size=40_000, context_length=8, d_model=256, n_layers=1, n_heads=2)
    train_state = make_learner(model)
    # Both moments: 12 bytes per parameter, some 125 MB, are written.
    save(tmp_path, train_state, 0)
    written = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    before, peak = peak_of(lambda: save(tmp_path, train_state, 1))
    assert peak - before < 0.1 * written


def peak_of(action: Callable[[], object]) -> tuple[int, int]:
    """Resident bytes before, and the most while something is done, by the kernel's own high-water mark."""
    Path("/proc/self/clear_refs").write_text("5")
    before = psutil.Process().memory_info().rss
    action()
    status = Path("/proc/self/status").read_text()
    return before, int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # pyright: ignore[reportOptionalSubscript]


def test_what_is_saved_is_not_changed_by_saving(tmp_path: Path) -> None:
    train_state = make_learner()
    learn(train_state, 0, 2)
    twin = copy.deepcopy(tensors(train_state))
    save(tmp_path, train_state, 2)
    assert_same(tensors(train_state), twin)


def test_another_form_of_attention_is_no_other_model(tmp_path: Path) -> None:
    model = dataclasses.replace(MODEL, vocab_size=61)
    train_states = [
        build_train_state(
            ResolvedRecipe(Recipe(model=dataclasses.replace(model, attention=form)), Precision("fp32", "cpu"))
        )
        for form in ("plain", "sdpa")
    ]
    with torch.no_grad():
        train_states[0].model.embedding.weight.add_(1)
    load_train_state(
        save_checkpoint(tmp_path, train_states[0], step=0, seconds=0.0, tokenizer="t", train_tokens="d"),
        train_states[1],
    )
    for before, after in zip(train_states[0].model.parameters(), train_states[1].model.parameters(), strict=True):
        assert torch.equal(before, after)
