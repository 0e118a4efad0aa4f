"""What the count says of a GPU's memory, beside the allocator of that GPU."""

import gc
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from napkin.accounting.counting import count
from napkin.accounting.cuda.caching_allocator import CachingAllocator
from napkin.hardware.doctor import examine
from napkin.hardware.host import detect_host

pytestmark = pytest.mark.gpu


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(256, 768), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.in_proj(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).flatten(-2))


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)), (64, 512)),
    "attention": (Attention, (4, 128, 256)),
    "encoder": (lambda: nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.1), (4, 128, 256)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        (8, 16, 32, 32),
    ),
    "embedding": (lambda: nn.Sequential(nn.LayerNorm(384), nn.Linear(384, 20000)), (256, 384)),
}


def test_the_host_names_the_gpu_as_torch_does(gpu: str) -> None:
    properties = torch.cuda.get_device_properties(0)
    found = detect_host().accelerators[0]
    assert found.name == properties.name
    assert found.memory_bytes == properties.total_memory
    assert [finding for finding in examine() if finding.state == "broken"] == []


@pytest.mark.parametrize("seed", range(3))
def test_the_allocator_reserves_what_its_replay_says(gpu: str, seed: int) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()["reserved_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    draw, model, held = random.Random(seed), CachingAllocator(), []
    for _ in range(400):
        if held and draw.random() < 0.45:
            model.free(held.pop(draw.randrange(len(held)))[1])
        else:
            size = draw.choice((draw.randint(1, 2**20), draw.randint(2**20, 2**24), draw.randint(2**24, 2**27)))
            held.append((torch.empty(size, dtype=torch.uint8, device=gpu), model.malloc(size)))
    assert torch.cuda.memory_stats()["reserved_bytes.all.peak"] - before == model.reserved_bytes


@pytest.mark.parametrize("name", MODULES)
def test_a_modules_step_takes_the_bytes_that_are_counted(gpu: str, name: str) -> None:
    build, shape = MODULES[name]
    optimizer = torch.optim.AdamW
    counted = count(build(), torch.empty(shape), optimizer=optimizer, target="cuda")
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    module, batch = build().to(gpu), torch.randn(shape, device=gpu)
    update = optimizer(module.parameters())
    for step in range(3):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        module(batch).sum().backward()
        update.step()
        update.zero_grad()
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(counted.peak_bytes, rel=1e-3)
