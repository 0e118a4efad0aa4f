"""The longest step of somebody's loop is found at just the step at which it comes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import napkin
from hooks.test_watched_loop import _on_a_device
from napkin.errors import NapkinError
from napkin.hooks import trainer_callback
from napkin.hooks.longest_batch import LongestBatch
from peers import peer


@pytest.fixture(autouse=True)
def quick_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("napkin.hooks.program_plan._machine", _on_a_device)


def rows(n: int = 40, planted: int = 17) -> list[dict[str, Any]]:
    """Rows of 8 to 15 tokens, and one of 60."""
    draw = torch.Generator().manual_seed(0)
    lengths = [60 if number == planted else 8 + number % 8 for number in range(n)]
    ids = [torch.randint(1, 64, (length,), generator=draw).tolist() for length in lengths]
    return [{"input_ids": each, "labels": each} for each in ids]


def padded(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = [torch.tensor(row["input_ids"]) for row in batch]
    joined = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return {"input_ids": joined, "labels": joined, "attention_mask": (joined > 0).long()}


@pytest.mark.parametrize("per_step", [1, 3])
def test_a_planted_row_is_found_at_its_step_in_the_order_of_the_run(per_step: int) -> None:
    data = rows()
    loader = DataLoader(
        data,  # pyright: ignore[reportArgumentType]
        batch_size=4,
        shuffle=True,
        collate_fn=padded,
        generator=torch.Generator().manual_seed(5),
    )
    found = LongestBatch(
        loader,
        per_step=per_step,
        n_steps=-(-10 // per_step),
        count=lambda batches: max(each["input_ids"].numel() for each in batches),
    )
    drawn = [[list(batch["input_ids"].shape) for batch in loader] for _ in range(2)]
    first = drawn[0]
    steps = [first[begin : begin + per_step] for begin in range(0, len(first), per_step)]
    expected = next(number for number, step in enumerate(steps) if any(length == 60 for _, length in step))
    told = found.find(100, max(n * length for n, length in steps[0]))
    assert told is not None
    assert told.first_beyond is not None
    assert (told.number, told.first_beyond.number) == (expected + 1, expected + 1)
    assert told.shape == "4 × 60 tokens"
    assert told.first_beyond.way_out == "a micro-batch of 1 or a length of 25 would fit"
    # A second look does not move the run's own sampler.
    again = DataLoader(
        data,  # pyright: ignore[reportArgumentType]
        batch_size=4,
        shuffle=True,
        collate_fn=padded,
        generator=torch.Generator().manual_seed(5),
    )
    assert [list(batch["input_ids"].shape) for batch in again] == first


def test_rows_without_tokens_and_streams_are_refused() -> None:
    loader: Any = DataLoader([{"text": "a"}] * 8, batch_size=2)  # pyright: ignore[reportArgumentType]
    found = LongestBatch(loader, per_step=1, n_steps=4, count=len)
    with pytest.raises(NapkinError, match="no token ids"):
        found.find(10, 1)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(rows())

    with pytest.raises(NapkinError, match="stream"):
        LongestBatch(DataLoader(Stream(), batch_size=2), per_step=1, n_steps=4, count=len)


def test_the_longest_step_of_a_loop_of_ones_own() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64))
    optimizer = torch.optim.SGD(model.parameters())
    sizes = [(4, 16), (4, 300), (4, 20), (2, 16)]

    def batch_of(number: int) -> torch.Tensor:
        return torch.zeros(sizes[number], dtype=torch.int64)

    def step(model: Any, optimizer: Any, ids: torch.Tensor) -> None:
        functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    with napkin.watch(model, optimizer) as watched:
        assert watched.plan_longest(step, sizes, batch_of) is None
        watched.plan_step(step, batch_of(0))
        told = watched.plan_longest(step, sizes, batch_of)
        assert told is not None
        assert (told.number, told.shape, told.first_beyond) == (2, "4 × 300 tokens", None)
        assert watched.plan is not None
        object.__setattr__(watched.plan.site, "memory_bytes", 10**5)
        told = watched.plan_longest(step, sizes, batch_of)
        assert told is not None
        assert told.is_counted
        # Logits of 1,200 tokens, their log-probabilities and their gradient, in fp32.
        assert told.peak_bytes > 2 * 1200 * 64 * 4
        assert told.first_beyond is not None
        assert told.first_beyond.number == 2


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_longest_step_of_a_real_trainer_takes_what_was_counted(
    accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = peer("transformers")
    # All sizes of batches are recorded, and the memory is that of a small device.
    monkeypatch.setattr("napkin.hooks.watched_loop.RECORDING_SHARE", 1.0)
    monkeypatch.setattr("napkin.hooks.watched_loop.METERED_STEP", 1)
    monkeypatch.setattr("napkin.hooks.watched_loop.step_memory", lambda memory: 10_000)
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, **heads)
    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=8, per_device_train_batch_size=4, report_to=[], save_strategy="no", disable_tqdm=True,
        use_cpu=True, gradient_accumulation_steps=accumulation, remove_unused_columns=False,
    )  # fmt: skip
    drawn: list[list[int]] = []

    class Noted(transformers.Trainer):
        def get_batch_samples(self, *given: Any, **named: Any) -> Any:
            found = super().get_batch_samples(*given, **named)
            drawn.append([each["input_ids"].shape[1] for each in found[0]])
            return found

    said: list[str] = []
    callback = trainer_callback(run=None, say=said.append)
    model = transformers.LlamaForCausalLM(config)
    Noted(model, args, train_dataset=rows(64, 41), data_collator=padded, callbacks=[callback]).train()
    watched = callback.watched
    assert watched is not None
    told = watched.longest
    assert told is not None, watched.obstacle
    expected = next(number for number, lengths in enumerate(drawn) if 60 in lengths)
    assert told.number == expected + 1
    assert told.first_beyond is not None
    assert any(f"memory runs out at step {told.first_beyond.number:,}" in line for line in said)
    peaks = [found.peak_bytes for found in watched.recorded.values()]
    assert told.peak_bytes == pytest.approx(max(peaks), rel=0.03)
