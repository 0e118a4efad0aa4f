"""Seconds of an update beside torch.optim in its fastest setting, for 5 and 50 million parameters of a Transformer.

    python benchmarks/optimizers.py
    python benchmarks/optimizers.py --only adamw "muon fp32"   # without native bf16, Muon in bf16 takes minutes a step

The contestants take turns in one process: a busy machine slows all of them.
torch's setting is the fastest of fused, foreach and one by one; the ratio is its time over ours, so that 1 is level and
more is faster. torch has no Lion. Its Muon multiplies in bf16, whatever the machine: ours is shown in both formats,
and both have the matrices of the blocks alone. The table is also written to benchmarks/results/.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from napkin.optim import SGD, Adafactor, AdaGrad, Adam, AdamW, Lion, Momentum, Muon, Nesterov, RMSProp
from result_files import heading, write_result
from turns import BRACKETS, Samples, fastest, in_turns, ratio_spread, seconds_of, spread

Build = Callable[..., torch.optim.Optimizer]
SIZES = {
    "5 M": {"vocab_size": 8192, "d_model": 256, "n_layers": 4},
    "50 M": {"vocab_size": 24576, "d_model": 512, "n_layers": 12},
}
DECAY = 0.1
PAIRS: dict[str, tuple[Build, Build | None]] = {
    "sgd": (SGD, partial(torch.optim.SGD, lr=0.1)),
    "momentum": (Momentum, partial(torch.optim.SGD, lr=0.01, momentum=0.9)),
    "nesterov": (Nesterov, partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True)),
    "adagrad": (AdaGrad, torch.optim.Adagrad),
    "rmsprop": (RMSProp, torch.optim.RMSprop),
    "adam": (Adam, torch.optim.Adam),
    "adamw": (AdamW, partial(torch.optim.AdamW, weight_decay=DECAY)),
    "lion": (Lion, None),
    "adafactor": (Adafactor, partial(torch.optim.Adafactor, weight_decay=DECAY)),
    "muon bf16": (partial(Muon, products=torch.bfloat16), partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")),
    "muon fp32": (Muon, partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")),
}
FORMS: dict[str, dict[str, bool]] = {
    "one by one": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def parameters_of(size: dict[str, int], *, hidden: bool) -> list[Tensor]:
    """The parameters of a GPT-like model, with gradients; only the blocks' matrices where `hidden`."""
    d, layers = size["d_model"], size["n_layers"]
    block = [*[(d, d)] * 4, (4 * d, d), (d, 4 * d)]
    others = [] if hidden else [(size["vocab_size"], d), *[(d,)] * (2 * layers)]
    parameters = [torch.randn(shape).mul_(0.02).requires_grad_() for shape in [*others, *block * layers]]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return parameters


def forms_of(build: Build | None, parameters: list[Tensor]) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Every form that the optimizer has."""
    for form, settings in FORMS.items() if build else ():
        assert build is not None
        try:
            yield form, build(parameters, **settings)
        except Exception:  # Each library refuses what it does not have in its own way.
            if form == "foreach":
                yield "one form", build(parameters)


def race(contestants: dict[str, torch.optim.Optimizer], seconds: float) -> Samples:
    """Seconds of steps of each, in turns, after one that makes the state."""
    turns = {who: partial(seconds_of, optimizer.step) for who, optimizer in contestants.items()}
    in_turns(turns, 1)
    samples = in_turns(turns, 6)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for who, more in in_turns(turns, 2).items():
            samples[who] += more
    return samples


def main() -> None:
    """Print a row an optimizer and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=6.0, help="of each race")
    parser.add_argument("--only", nargs="*", choices=PAIRS, default=list(PAIRS), metavar="NAME")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines = [
        *heading("Optimizers beside torch's", f"ms per step. {BRACKETS}"),
        "| parameters | optimizer | one by one | foreach | fused | torch | in its form | torch / best of ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines[-2:]), flush=True)
    for size_name, size in SIZES.items():
        for name, (ours, theirs) in PAIRS.items():
            if name in options.only:
                lines.append(f"| {size_name} | {name} | {row(ours, theirs, size, name, options.seconds)} |")
                print(lines[-1], flush=True)
    write_result("optimizers", lines)


def row(ours: Build, theirs: Build | None, size: dict[str, int], name: str, seconds: float) -> str:
    """All forms of ours, torch's best, and the ratio of best to best."""
    parameters = parameters_of(size, hidden=name.startswith("muon"))
    contestants = {f"ours {form}": o for form, o in forms_of(ours, parameters)}
    contestants |= {f"torch {form}": o for form, o in forms_of(theirs, parameters)}
    found = race(contestants, seconds)
    cells = [_ms(found[f"ours {form}"]) if f"ours {form}" in found else "–" for form in FORMS]
    if theirs is None:
        return " | ".join([*cells, "–", "–", "–"])
    best, setting = (fastest(found, [who for who in found if who.startswith(whose)]) for whose in ("ours", "torch"))
    ratio = ratio_spread(found[setting], found[best])
    return " | ".join([*cells, _ms(found[setting]), setting.removeprefix("torch "), ratio])


def _ms(seconds: list[float]) -> str:
    return spread([1e3 * each for each in seconds])


if __name__ == "__main__":
    main()
