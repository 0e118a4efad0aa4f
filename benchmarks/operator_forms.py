"""Seconds of the form that napkin chooses by timing over those of torch's operator, over some two hundred shapes.

    python benchmarks/operator_forms.py
    python benchmarks/operator_forms.py --parts products decoding --every 3
    python benchmarks/operator_forms.py --parts blocks --every 3 --first 1   # another third, in another quiet minute
    python benchmarks/operator_forms.py --instructions avx2     # as on a processor that has no more than these

For each shape a form is chosen as for a run or a model, by `napkin.hardware.form_timing`, and nothing is kept. Then it
is timed again beside torch's, in turns: the ratio is the median of pairs with its interval of 95%, and 1 by definition
where torch's was chosen.
Blocks are chosen at the bounded width at which they are timed, and compared at their own. `operators` are the compiled
operators of a step, alone and in cache, forward and backward: they are not chosen one by one, but with their blocks.
`quantized` are products with integers of 8 and 4 bits beside torch's packed operators. The table is also written to
benchmarks/results/.
"""

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from napkin.benchmarking.case import Draw
from napkin.benchmarking.operators import OPERATORS
from napkin.hardware.competition import Sampler
from napkin.hardware.form_timing import Forms, time_forms, undisturbed_clock
from napkin.hardware.host import keep_freed_memory
from napkin.hardware.sampling import Interval, Sampling, Timed, ratio_interval, sample_in_turns
from napkin.inference.decoding_forms import forms_of_passes, forms_of_products
from napkin.kernels.operator_forms import LIMITS_OF_LIBRARIES, pinned_forms, this_processor
from napkin.kernels.products.linear import FEW_PRODUCTS, FEW_VECTORS
from napkin.model.compiled_blocks import FEW_ROWS
from napkin.model.config import ModelConfig
from napkin.model.quantized import Int4Linear, Int8Linear
from napkin.model.transformer import Transformer
from napkin.planning.step.block_timing import narrowed, passes_of_blocks
from napkin.planning.step.kernel_choice import candidates_of
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import TrainingConfig
from result_files import heading, write_result
from turns import BRACKETS, told

SLOWER = 1.03
MOST_TURNS = 4
KEPT = Interval(1.0, 1.0, 1.0, 1.0, 0)
"""The ratio of torch's own form."""
LIMITS = (*LIMITS_OF_LIBRARIES, "NUMBA_CPU_NAME")
INSTRUCTIONS = {
    "avx512": ("AVX512_CORE", "skylake-avx512", ("avx512bf16", "avx512fp16", "avx512vnni", "avxvnni", "avx10", "amx")),
    "avx2": ("AVX2", "haswell", ("avx512", "avxvnni", "avx10", "amx")),
}
"""What oneDNN and LLVM call a processor with no more than these, and beginnings of the features that it lacks."""
LLAMA = ModelConfig(vocab_size=16, n_layers=1)
GPT2 = dataclasses.replace(LLAMA, norm="layer", feed_forward="gelu_tanh", positions="learned", biases="all")
BLOCKS = [
    (128, 64, 12), (128, 256, 8), (256, 128, 16), (256, 256, 8), (256, 512, 4), (256, 1024, 4), (256, 2048, 1),
    (512, 256, 8), (512, 512, 4), (512, 1024, 2), (768, 256, 4), (768, 1024, 1),
]  # fmt: skip
"""d_model, context length, sequences; heads of 64, of 32 for the narrowest."""
MATRICES = [
    (512, 512), (768, 768), (1024, 1024), (2048, 2048), (4096, 4096), (2304, 768), (3072, 768), (768, 3072),
    (4096, 1024), (1024, 4096), (1536, 576), (576, 1536), (3072, 576), (5504, 2048), (2048, 5504), (8192, 2048),
    (32768, 512), (50304, 768),
]  # fmt: skip
MODELS = [(256, 8, 8), (512, 8, 8), (768, 12, 12), (1024, 16, 8), (1536, 12, 8)]
"""d_model, heads, layers."""
OF_ROWS = ((256, 128), (2048, 256), (4096, 512), (8192, 768), (1024, 2048))
OPERATORS_OF_STEPS: dict[str, tuple[str, list[dict[str, int]]]] = {
    "rms_norm": ("kernel", [{"tokens": n, "d_model": d} for n, d in OF_ROWS]),
    "rope": ("halves", [{"context_length": n, "n_heads": h} for n, h in ((128, 4), (256, 4), (512, 8), (1024, 12))]),
    "swiglu": ("kernel", [{"tokens": n, "d_ff": 8 * d // 3 // 32 * 32} for n, d in OF_ROWS]),
    "gelu_tanh": ("torch", [{"tokens": n, "d_ff": 4 * d} for n, d in OF_ROWS]),
    "linear_cross_entropy": (
        "fused",
        [
            {"tokens": n, "d_model": d, "vocab_size": v}
            for n, d, v in ((512, 128, 512), (2048, 256, 4096), (1024, 256, 8192), (1024, 512, 16384))
        ],
    ),
}
"""The form of each operator in a step with plain kernels, and shapes."""


class Row(NamedTuple):
    """A shape, the form that was chosen for it, and its seconds over those of torch's."""

    part: str
    shape: str
    form: str
    ratio: Interval


def chosen_beside(part: str, shape: str, forms: Forms, torchs: str, seconds: float) -> Row:
    """Choose a form, and time it again beside torch's."""
    form = time_forms(part, (shape,), forms, default=torchs, seconds=seconds).form
    return Row(part, shape, form, ratio_of(forms[form], forms[torchs], seconds) if form != torchs else KEPT)


def ratio_of(own: Callable[[], object], torchs: Callable[[], object], seconds: float) -> Interval:
    """The seconds of one form over those of the other, in pairs; more of them while it is open whether it is slower."""
    first, second, turns = list[float](), list[float](), 0
    with Sampler() as sampler:
        while turns == 0 or (turns < MOST_TURNS and ratio_interval(first, second).high > SLOWER):
            timed = [Timed(own), Timed(torchs)]
            more = sample_in_turns(timed, undisturbed_clock(sampler), Sampling(seconds=seconds))
            first, second, turns = [*first, *more[0]], [*second, *more[1]], turns + 1
    return ratio_interval(first, second)


def blocks(chosen: slice) -> Iterator[Row]:
    """Blocks of Llama's and GPT-2's kind, forward and backward."""
    for name, kind, base in (("bf16", "llama", LLAMA), ("bf16", "gpt2", GPT2), ("fp32", "llama", LLAMA)):
        precision = Precision(name, "cpu")  # pyright: ignore[reportArgumentType]
        for d_model, length, size in BLOCKS[chosen]:
            n_heads = d_model // (64 if d_model > 128 else 32)
            model = dataclasses.replace(base, d_model=d_model, n_heads=n_heads, context_length=length)
            recipe = Recipe(model=model, training=TrainingConfig(batch_size=size))
            recipe = dataclasses.replace(recipe, optimizer=recipe.optimizer.resolved)
            own = {f"{each.training.kernels} {each.model.attention}": each for each in candidates_of(recipe, precision)}
            timed = {form: passes_of_blocks(narrowed(each), precision) for form, each in own.items()}
            form = time_forms("blocks", (), timed, default="plain sdpa").form
            whole, torchs = (passes_of_blocks(own[each], precision) for each in (form, "plain sdpa"))
            ratio = KEPT if form == "plain sdpa" else ratio_of(whole, torchs, 0.1)
            yield Row("blocks", f"{name} {kind} {size} × {length} × {d_model}", form, ratio)


def products(chosen: slice) -> Iterator[Row]:
    """Few vectors by a matrix in bf16, read from memory."""
    pool = [torch.randn(2**26).to(torch.bfloat16)[None]]
    for rows, columns in MATRICES[chosen]:
        for n in FEW_VECTORS:
            forms = forms_of_products(pool, torch.Size((rows, columns)), n)
            yield chosen_beside("products", f"bf16 {n} × {columns} × {rows}", forms, "torch", 0.02)


def decoding(chosen: slice) -> Iterator[Row]:
    """Few new tokens through the blocks of a model, beside its blocks one after the other with torch's products."""
    for dtype in (torch.bfloat16, torch.float32):
        for d_model, n_heads, n_layers in MODELS[chosen]:
            config = dataclasses.replace(LLAMA, d_model=d_model, n_heads=n_heads, n_layers=n_layers)
            model = Transformer(config).eval().to(dtype)
            for n in FEW_ROWS:
                with pinned_forms({FEW_PRODUCTS: "torch"}):
                    forms = forms_of_passes(model, n)
                    shape = f"{str(dtype)[6:]} {n} × {d_model} × {n_layers} layers"
                    yield chosen_beside("decoding", shape, forms, "block by block", 0.02)


def operators(chosen: slice) -> Iterator[Row]:
    """The compiled operators of a step beside torch's."""
    for dtype in (torch.bfloat16, torch.float32):
        for name, (torchs, shapes) in OPERATORS_OF_STEPS.items():
            operator = OPERATORS[name]
            for shape in shapes[chosen]:
                inputs = operator.inputs({**operator.sizes, **shape}, Draw("cpu", dtype))
                leaves = [each for each in inputs if each.requires_grad]

                def passes(form: str, operator=operator, inputs=inputs, leaves=leaves) -> None:
                    result = operator.forms[form](*inputs)
                    torch.autograd.grad(result, leaves, torch.ones_like(result))

                ratio = ratio_of(partial(passes, "compiled"), partial(passes, torchs), 0.02)
                sizes = " × ".join(map(str, shape.values()))
                yield Row("operators", f"{str(dtype)[6:]} {name} {sizes}", "compiled", ratio)


def quantized(chosen: slice) -> Iterator[Row]:
    """Few vectors by integers of 8 and 4 bits, beside torch's packed operators on the same integers, read from memory.

    Torch's for 4 bits reads them in another order than napkin holds them."""
    for rows, columns in MATRICES[:17:2][chosen]:
        weight = torch.randn(rows, columns) / columns**0.5
        for kind in (Int8Linear, Int4Linear):
            tensors = kind.quantized(weight)
            copies = 1 + 2**26 // tensors["values"].nbytes
            layers = [kind(rows, columns, {k: v.clone() for k, v in tensors.items()}) for _ in range(copies)]
            of_torch = [_packed(each) for each in layers]
            for n in (1, 4, 8):
                x, own, others = torch.randn(n, columns).to(torch.bfloat16), cycle(layers), cycle(of_torch)

                def integers(x: Tensor = x, in_turn: Iterator[Callable[[Tensor], object]] = own) -> None:
                    next(in_turn)(x)

                with torch.inference_mode():
                    ratio = ratio_of(integers, partial(integers, x, others), 0.02)
                yield Row("quantized", f"{kind.format} {n} × {columns} × {rows}", "integers", ratio)


def _packed(layer: Int8Linear | Int4Linear) -> Callable[[Tensor], object]:
    """Torch's product with the weights of a layer."""
    values, scales = layer.values, layer.scales
    if isinstance(layer, Int8Linear):
        return lambda x: torch.ops.aten._weight_int8pack_mm(x, values, scales)
    assert layer.middles is not None
    integers = torch.stack((values & 15, values >> 4), dim=2).flatten(1).int()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers, 1)
    pairs = torch.stack((scales, layer.middles), dim=2).transpose(0, 1).contiguous()
    size = layer.group_size
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, size, pairs)


def limited(instructions: str) -> dict[str, str]:
    """The environment in which torch, oneDNN and numba use no newer instructions."""
    from llvmlite.binding import get_host_cpu_features

    isa, name, missing = INSTRUCTIONS[instructions]
    features = get_host_cpu_features()
    features |= {each: False for each in features if each.startswith(missing)}
    return {
        "ATEN_CPU_CAPABILITY": instructions,
        "ONEDNN_MAX_CPU_ISA": isa,
        "DNNL_MAX_CPU_ISA": isa,
        "NUMBA_CPU_NAME": name,
        "NUMBA_CPU_FEATURES": ",".join(f"{'+' if has else '-'}{each}" for each, has in sorted(features.items())),
    }


PARTS = {each.__name__: each for each in (blocks, products, decoding, operators, quantized)}


def main() -> None:
    """Print a row a shape, and a summary a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--every", type=int, default=1, help="time every n-th shape of a part")
    parser.add_argument("--first", type=int, default=0, help="the number of shapes of a part to leave out before that")
    parser.add_argument("--instructions", choices=INSTRUCTIONS, help="use no newer instructions than these")
    options = parser.parse_args()
    if options.instructions and not os.environ.get("NUMBA_CPU_NAME"):
        # Libraries read what they may use when they are imported.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **limited(options.instructions)})
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    limits = [f"{name}={value}" for name in LIMITS if (value := os.environ.get(name))]
    lines = [
        *heading(
            f"The fastest forms, torch's capability {this_processor().capability}",
            *([f"Libraries are told to use less: {', '.join(limits)}"] if limits else []),
            BRACKETS,
        ),
        "| part | shape | form | seconds over torch's |",
        "|---|---|---|---|",
    ]
    print("\n".join(lines[-2:]), flush=True)
    rows: list[Row] = []
    for part in options.parts:
        for row in PARTS[part](slice(options.first, None, options.every)):
            rows.append(row)
            lines.append(f"| {row.part} | {row.shape} | {row.form} | {told(row.ratio)} |")
            print(lines[-1], flush=True)
    lines += ["", "| part | shapes | torch's kept | median | worst | slower than 1.03 | surely |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for part in options.parts:
        ratios = [row.ratio for row in rows if row.part == part]
        own = [each.median for each in ratios]
        kept, slower = sum(each is KEPT for each in ratios), sum(each > SLOWER for each in own)
        surely = sum(each.low > SLOWER for each in ratios)
        lines.append(
            f"| {part} | {len(own)} | {kept} | {statistics.median(own):.2f} | {max(own):.2f} | {slower} | {surely} |"
        )
    print("\n".join(lines[-len(options.parts) - 2 :]))
    write_result("operator-forms", lines)


if __name__ == "__main__":
    main()
