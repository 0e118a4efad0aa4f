"""Generation on a GPU, beside the plain model on the CPU."""

import pytest
import torch

from napkin.inference.engine import Engine
from napkin.inference.generation import generate
from napkin.inference.paged_cache import PagedCache
from napkin.inference.requests import Request
from napkin.inference.settings import Sampling
from napkin.model.config import ModelConfig
from napkin.model.kernel_forms import use_decoding_kernels
from napkin.model.transformer import Transformer

pytestmark = pytest.mark.gpu
CONFIG = ModelConfig(vocab_size=512, context_length=256, d_model=128, n_layers=2, n_heads=4, n_kv_heads=2)
PROMPTS = [[7, 8, 9], list(range(40)), [5] * 100, [11]]
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def plain() -> Transformer:
    torch.manual_seed(0)
    return Transformer(CONFIG).eval()


@pytest.fixture(scope="module")
def expected(plain: Transformer) -> list[list[int]]:
    """The most likely token after each of the plain model's forward passes over the whole text."""
    continuations = []
    with torch.no_grad():
        for prompt in PROMPTS:
            ids = list(prompt)
            for _ in range(24):
                ids.append(int(plain(torch.tensor([ids]))[0, -1].argmax()))
            continuations.append(ids[len(prompt) :])
    return continuations


def on(device: str, plain: Transformer) -> Transformer:
    model = Transformer(CONFIG).eval()
    model.load_state_dict(plain.state_dict())
    return model.to(device)


def test_greedy_text_is_the_plain_models(device: str, plain: Transformer, expected: list[list[int]]) -> None:
    model = on(device, plain)
    for prompt, continuation in zip(PROMPTS, expected, strict=True):
        assert list(generate(model, prompt, 24, GREEDY)) == continuation


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_an_engine_gives_each_request_the_plain_models_text(
    device: str, plain: Transformer, expected: list[list[int]], kv: str
) -> None:
    engine = Engine(on(device, plain), max_running=4, kv=kv)  # pyright: ignore[reportArgumentType]
    completions = [engine.submit(Request(prompt, 24, GREEDY)) for prompt in PROMPTS]
    engine.run()
    equal = sum(each.tokens == ids for each, ids in zip(completions, expected, strict=True))
    # Rounded keys and values may turn a near tie.
    assert equal == len(PROMPTS) if kv == "auto" else equal >= len(PROMPTS) - 1


def test_replayed_steps_give_the_text_of_launched_ones(device: str, plain: Transformer) -> None:
    model, texts = on(device, plain), []
    for replays in (True, False):
        engine = Engine(model, max_running=4)
        if not replays:
            engine.graphs.obstacle = "steps are launched one by one"
        settings = [Sampling(temperature=0.7 * (seed % 2), seed=seed) for seed in range(len(PROMPTS))]
        made = [engine.submit(Request(prompt, 40, each)) for prompt, each in zip(PROMPTS, settings, strict=True)]
        engine.run()
        texts.append([each.tokens for each in made])
        if replays and device == "cuda":
            assert engine.graphs.obstacle is None
    assert texts[0] == texts[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@torch.inference_mode()
def test_a_step_in_few_launches_is_the_plain_one(device: str, plain: Transformer, dtype: torch.dtype) -> None:
    tables, lengths = [[0, 1, 2], [5, 4, 3], [6]], [40, 33, 3]
    hidden = []
    for few in (False, True):
        model = on(device, plain).to(dtype)
        if few:
            use_decoding_kernels(model)
        cache = PagedCache(CONFIG, 7, 16, dtype=dtype, device=device)
        for table, length in zip(tables, lengths, strict=True):
            prompt = torch.arange(length, device=device)[None]
            model.hidden(prompt, cache=cache.extend([table], [0], [length], length))
        new = torch.tensor([[7], [8], [9]], device=device)
        hidden.append(model.hidden(new, cache=cache.extend(tables, lengths, [1] * 3, 1)))
    bound = 1e-4 if dtype == torch.float32 else 2e-2 if dtype == torch.float16 else 1e-1
    torch.testing.assert_close(hidden[1], hidden[0], rtol=bound, atol=bound)
