"""The callback beside the real Trainer of Lightning: it changes nothing, and plans the module's own step."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

from hooks.test_watched_loop import Model, _on_a_device
from napkin.hooks import lightning_callback
from peers import peer

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def quick_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("napkin.hooks.program_plan._machine", _on_a_device)


def train(callbacks: list[Any], *, fails_at: int = 0, **options: Any) -> Any:
    lightning = peer("pytorch_lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls = Model(), 0

        def training_step(self, ids: torch.Tensor, number: int) -> torch.Tensor:
            self.calls += 1
            if self.calls == fails_at:
                raise ValueError("no")
            loss = F.cross_entropy(self.net(ids).flatten(0, 1), ids.flatten())
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    torch.manual_seed(0)
    ids = torch.randint(0, 64, (64, 9), generator=torch.Generator().manual_seed(1))
    trainer = lightning.Trainer(
        max_steps=6,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **options,
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(ids, batch_size=4))  # pyright: ignore[reportArgumentType]
    return module


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}, {"precision": "bf16-mixed"}],
    ids=["plain", "accumulated", "clipped", "bf16"],
)
def test_the_plan_is_what_the_modules_step_does_and_training_is_as_without_it(options: dict[str, Any]) -> None:
    alone = train([], **options)
    callback = lightning_callback(run=None, say=None)
    beside = train([callback], **options)
    for name, value in alone.state_dict().items():
        assert torch.equal(value, beside.state_dict()[name]), name
    watched = callback.watched
    assert watched is not None
    assert watched.plan is not None, watched.obstacle
    assert watched.measurement is not None
    assert watched.steps == 6
    assert watched.plan.ledger.flops == watched.measurement.ledger.flops > 0
    assert watched.plan.ledger.peak_bytes == pytest.approx(watched.measurement.peak_bytes, rel=0.03)


def test_an_error_in_the_recorded_step_leaves_no_recorder() -> None:
    # `training_step` of the planned step is a twin's, which counts calls of its own.
    callback = lightning_callback(run=None, plan=False, say=None)
    with pytest.raises(ValueError, match="no"):
        train([callback], fails_at=3)
    assert _get_current_dispatch_mode() is None
    assert callback.watched is not None
    assert callback.watched.steps == 2
    assert not callback.watched.recorded
