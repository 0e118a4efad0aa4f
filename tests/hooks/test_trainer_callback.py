"""The callback beside the real Trainer: it changes nothing, and plans the trainer's own step."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from hooks.test_watched_loop import _on_a_device
from napkin.hooks import trainer_callback
from napkin.report.comparison import read_run
from peers import peer

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def quick_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("napkin.hooks.program_plan._machine", _on_a_device)


def llama() -> Any:
    transformers = peer("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
    )
    return transformers.LlamaForCausalLM(config)


def rows(length: int = 32) -> list[dict[str, Any]]:
    ids = torch.randint(0, 128, (64, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in ids]


def train(folder: Path, callbacks: list[Any], model: Any = None, **options: Any) -> Any:
    transformers = peer("transformers")
    options = {"max_steps": 6, "per_device_train_batch_size": 4, "logging_steps": 1, **options}
    args = transformers.TrainingArguments(
        str(folder / "out"), report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, seed=3, **options
    )
    trainer = transformers.Trainer(model or llama(), args, train_dataset=rows(), callbacks=callbacks)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 4},
        {"bf16": True},
        {"gradient_checkpointing": True},
        {"max_grad_norm": 0.0, "optim": "sgd"},
        {"label_smoothing_factor": 0.1},
    ],
    ids=["plain", "accumulated", "bf16", "checkpointed", "sgd", "smoothed"],
)
def test_the_plan_is_what_the_trainers_step_does_and_training_is_as_without_it(
    options: dict[str, Any], tmp_path: Path
) -> None:
    alone = train(tmp_path, [], **options)
    state = torch.get_rng_state()
    said: list[str] = []
    callback = trainer_callback(run=tmp_path / "runs" / "a", say=said.append)
    watched_by = train(tmp_path, [callback], **options)
    for name, value in alone.model.state_dict().items():
        assert torch.equal(value, watched_by.model.state_dict()[name]), name
    assert torch.equal(state, torch.get_rng_state())
    losses = [[each.get("loss") for each in trainer.state.log_history] for trainer in (alone, watched_by)]
    assert losses[0] == losses[1]
    watched = callback.watched
    assert watched is not None
    assert watched.plan is not None, watched.obstacle
    assert watched.measurement is not None
    assert watched.plan.ledger.flops == watched.measurement.ledger.flops > 0
    assert watched.plan.ledger.hardware_flops == watched.measurement.ledger.hardware_flops
    assert watched.plan.ledger.peak_bytes == pytest.approx(watched.measurement.peak_bytes, rel=0.02)
    run = read_run(tmp_path / "runs" / "a", training=False).summary
    assert (run.state, run.step) == ("finished", 6)
    assert run.loss is not None
    assert run.tokens == 6 * 4 * 32 * options.get("gradient_accumulation_steps", 1)
    assert any("FLOPs per step" in line for line in said)
    assert "training_step" not in vars(watched_by)
    assert "get_batch_samples" not in vars(watched_by)


def test_a_batch_with_padding_is_planned_as_it_is(tmp_path: Path) -> None:
    transformers = peer("transformers")
    data = rows()
    for number, row in enumerate(data):
        row["attention_mask"] = (torch.arange(32) < 20 + number % 4).long()
    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True
    )
    callback = trainer_callback(run=None, say=None)
    transformers.Trainer(llama(), args, train_dataset=data, callbacks=[callback]).train()
    watched = callback.watched
    assert watched is not None
    assert watched.plan is not None, watched.obstacle
    assert watched.measurement is not None
    assert watched.plan.ledger.flops == watched.measurement.ledger.flops
    assert watched.plan.ledger.peak_bytes == pytest.approx(watched.measurement.peak_bytes, rel=0.02)


@pytest.mark.parametrize("where", ["training_step", "clipping", "optimizer", "callback"])
def test_an_error_in_the_recorded_step_leaves_no_recorder(where: str, tmp_path: Path) -> None:
    transformers = peer("transformers")
    calls: list[int] = []

    def failing_third(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise ValueError("no")
            return function(*args, **kwargs)

        return call

    class Failing(transformers.TrainerCallback):
        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            failing_third(lambda: None)()

    class Trainer(transformers.Trainer):
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            made = super().create_optimizer(*args, **kwargs)
            if where == "optimizer":
                made.step = failing_third(made.step)
            return made

    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=6, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True
    )
    callback = trainer_callback(run=tmp_path / "runs" / "a", plan=False, say=None)
    trainer = Trainer(llama(), args, train_dataset=rows(), callbacks=[callback])
    if where == "training_step":
        trainer.compute_loss = failing_third(trainer.compute_loss)
    elif where == "clipping":
        trainer._clip_grad_norm = failing_third(trainer._clip_grad_norm)
    elif where == "callback":
        trainer.add_callback(Failing())
    with pytest.raises(ValueError, match="no"):
        trainer.train()
    assert _get_current_dispatch_mode() is None
    assert not torch._C._autograd._profiler_enabled()  # pyright: ignore[reportAttributeAccessIssue]
    assert not {"training_step", "_run_epoch", "get_batch_samples"} & set(vars(trainer))
    assert callback.watched is not None
    assert callback.watched.steps == 2
    assert not callback.watched.recorded
    assert read_run(tmp_path / "runs" / "a", training=False).summary.step == 2
    # It trains again, into a folder of its own.
    trainer.train()
    assert callback.watched.run == tmp_path / "runs" / "a-2"
    assert callback.watched.measurement is not None


def word_tokenizer() -> Any:
    transformers, tokenizers = peer("transformers"), peer("tokenizers")
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *(f"w{n}" for n in range(120))])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<eos>", pad_token="<pad>", unk_token="<eos>"
    )


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_trainers_of_trl_are_planned_by_their_own_step(kind: str, tmp_path: Path) -> None:
    trl, datasets = peer("trl"), peer("datasets")
    tokenizer = word_tokenizer()
    text = " ".join(f"w{n % 120}" for n in range(20))
    row = {"text": text} if kind == "SFT" else {"prompt": "w1 w2", "chosen": text, "rejected": text[:40]}
    config = getattr(trl, f"{kind}Config")(
        str(tmp_path), max_steps=4, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, bf16=False
    )
    said: list[str] = []
    callback = trainer_callback(run=None, say=said.append)
    trainer = getattr(trl, f"{kind}Trainer")(
        llama(),
        args=config,
        train_dataset=datasets.Dataset.from_list([row] * 64),
        processing_class=tokenizer,
        callbacks=[callback],
        **({"ref_model": llama()} if kind == "DPO" else {}),
    )
    trainer.train()
    watched = callback.watched
    assert watched is not None
    assert watched.plan is not None, watched.obstacle
    assert watched.measurement is not None
    assert watched.plan.ledger.flops == watched.measurement.ledger.flops > 0
    assert watched.plan.ledger.peak_bytes == pytest.approx(watched.measurement.peak_bytes, rel=0.05)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_of_grpo_the_training_part_is_counted_and_generation_is_timed(accumulation: int, tmp_path: Path) -> None:
    trl, datasets = peer("trl"), peer("datasets")
    config = trl.GRPOConfig(
        str(tmp_path),
        max_steps=4,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        num_generations=4,
        max_completion_length=8,
        # Completions that all have the same length.
        generation_kwargs={"min_new_tokens": 8},
        gradient_checkpointing=False,
    )
    callback = trainer_callback(run=None, say=None)
    trainer = trl.GRPOTrainer(
        llama(),
        reward_funcs=lambda completions, **_: [float(len(each)) for each in completions],
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": "w1 w2 w3"}] * 32),
        processing_class=word_tokenizer(),
        callbacks=[callback],
    )
    trainer.train()
    watched = callback.watched
    assert watched is not None
    assert watched.plan is not None, watched.obstacle
    assert watched.measurement is not None
    assert watched.plan.ledger.flops == watched.measurement.ledger.flops > 0
    assert watched.plan.ledger.peak_bytes == pytest.approx(watched.measurement.peak_bytes, rel=0.05)
    assert watched.tokens == 4 * accumulation * 4 * (3 + 8)
    assert watched.spent.other["generation"] > 0
    assert "of the training part of a step" in watched.plan.ledger.assumption
    assert "of the training part of a step" in str(watched.table())
    assert "_prepare_inputs" not in vars(trainer)
