"""Cross-entropy, the mean of -log p(target): from logits, or fused with the output head, never holding all logits.

For 4096 tokens and a vocabulary of 4096 the logits and their gradient are 134 MB, the largest tensors of a small
model's step. The gradient of the loss with respect to a token's logits is softmax(logits) - onehot(target): it needs
nothing from the backward pass but one factor. So the fused operator computes a chunk of logits, turns it into its
gradient, multiplies that into the gradients of hidden states and weight, and drops it.

What happens between the products has three forms: torch's operators; a compiled loop for a CPU (numba_loss.py) in which
a row of logits stays in cache while it becomes its gradient, in place: one pass over memory instead of eight; and a
Triton kernel (triton_cross_entropy.py; Hsu et al. 2024, Liger) that reads each logit twice and writes it once. Without
a gradient, as in evaluations, products and softmax are one compiled loop where that is the fastest form: no logit is
written to memory (numba_head.py).

Each chunk reads the weight twice, and reads and writes its gradient: with products in bf16, 12 bytes per number of the
weight, whatever the chunk's rows. Its products compute 6 FLOPs per number and row. So the traffic of a chunk of c rows
is 2 / c bytes per FLOP. A CPU has few FLOPs per byte, and a cache that a small chunk stays in. An H100 computes 295
FLOPs in the time of a byte: chunks of 512 rows take 1.15 times as long to move as to compute, of 8192 rows 0.07 times.
"""

from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from napkin.kernels.attention.by_tiles import MULTIPLE, multiplies_pairs
from napkin.kernels.operator_forms import ShapeClass, fastest_form
from napkin.kernels.operators import (
    adds_wide_products,
    cpu_operator,
    dtype_of_product,
    early_gradient,
    is_bf16,
    is_computed,
    on_threads,
    operator,
    scaled,
)

# Measured on one CPU core with 4096 tokens of width 256 and a vocabulary of 4096, in fp32 and bf16: 298 and 163 ms.
# 1024 rows take 304 and 176 ms; full logits in autograd 426 and 315 ms, and in fp32 201 MB at their peak instead of 26.
CHUNK_SIZE = 512
_LARGEST_CHUNK = 8192
"""Rows from which the weight and its gradient take less than an eighth of the products' time to move, on every GPU."""
_CHUNK_SHARE = 1 / 16
"""The part of a GPU's memory that the logits of a chunk may take."""
_BYTES_PER_LOGIT = 8
"""Bytes per logit that torch's operators hold at once: logits in bf16, slopes of a soft cap, and the softmax in
fp32."""
_SMALLEST_IN_LOOPS = 2**18
"""Logits from which log probabilities are worth loading the compiled loop."""
HEAD = "head_without_gradient"
MOST_WORDS = 2**13
"""The largest vocabulary for which the forms of a head without a gradient are timed."""
_BLOCK_NUMBERS = 2**17
"""Numbers of the head's weight that are packed at a time, in bf16 a quarter of a small second cache."""
_BLOCK_COLUMNS = 512
"""The most logits of a row that are held at a time: those of eight rows fit into a first cache."""


def loss_chunk_size(vocab_size: int, memory_bytes: float | None) -> int:
    """Return how many rows of logits are held at a time on a GPU with this much memory; None is a CPU.

    A power of two from 512 to 8192: the largest whose logits take at most a sixteenth of the memory.
    """
    if memory_bytes is None:
        return CHUNK_SIZE
    fits = int(_CHUNK_SHARE * memory_bytes / (_BYTES_PER_LOGIT * vocab_size))
    return min(max(1 << max(fits, 1).bit_length() - 1, CHUNK_SIZE), _LARGEST_CHUNK)


def chunk_size_of(weight: Tensor) -> int:
    """Return the chunk size of a loss whose output head has that weight, by the memory of its device."""
    memory_bytes = torch.cuda.get_device_properties(weight.device).total_memory if weight.is_cuda else None
    return loss_chunk_size(len(weight), memory_bytes)


def cross_entropy(
    logits: Float[Tensor, "*batch vocab_size"], targets: Int[Tensor, "*batch"], ignore_index: int = -1
) -> Float[Tensor, ""]:
    """The mean of logsumexp(logits) - logits[target] over the targets that are not ignore_index, in fp32.

    0 if every target is ignored.
    """
    logits = logits.float()
    counts = targets != ignore_index
    target_logits = logits.gather(-1, targets.where(counts, 0).unsqueeze(-1)).squeeze(-1)
    losses = (logits.logsumexp(dim=-1) - target_logits).where(counts, 0)
    return losses.sum() / counts.sum().clamp(min=1)


def target_log_probabilities(logits: Float[Tensor, "n vocab_size"], targets: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """log softmax(logits)[target] of each row, in fp32 or wider; without a gradient.

    Many logits in bf16 on a CPU are read once, by the loss's compiled loop.
    """
    if logits.dtype == torch.bfloat16 and logits.numel() >= _SMALLEST_IN_LOOPS and is_computed(logits):
        target_logits, logsumexp, _ = loss_rows_(logits.detach(), targets.unsqueeze(1), 0.0, 0.0, False, False)
    else:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        target_logits, logsumexp = logits.gather(1, targets.unsqueeze(1)), logits.logsumexp(dim=1, keepdim=True)
    return (target_logits - logsumexp).squeeze(1)


def linear_cross_entropy(
    hidden: Float[Tensor, "n d_model"],
    weight: Float[Tensor, "vocab_size d_model"],
    targets: Int[Tensor, " n"],
    *,
    chunk_size: int | None = None,
    ignore_index: int = -1,
    z_weight: float = 0.0,
    logit_softcap: float | None = None,
    vocabulary: "Vocabulary | None" = None,
    compiled: bool = False,
) -> Float[Tensor, ""]:
    """cross_entropy(hidden · weightᵀ, targets), with at most chunk_size rows of logits held at a time; None is what
    `loss_chunk_size` says for the weight's device.

    With a z_weight, z_weight · mean(logsumexp(logits)²) is added (Chowdhery et al. 2022, section 5). With a
    logit_softcap, logits are bounded before all else, as cap · tanh(logit / cap) (Gemma Team 2024). `vocabulary` says
    which ids the rows of `weight` are; None is all of them. `compiled` takes the compiled loop where there is one: for
    all ids, on a CPU, in fp32 and bf16.

    Under autocast the products are in autocast's dtype; softmax, loss and the weight's gradient are fp32. Gradients
    are computed and kept in the forward pass, and the backward pass only scales them: in place, so a second backward
    pass through the same loss raises a RuntimeError.
    """
    device_type = hidden.device.type
    dtype = dtype_of_product(hidden, weight)
    chunk_size = chunk_size or chunk_size_of(weight)
    # Dtypes are chosen here, operator by operator.
    settings = (dtype, chunk_size, ignore_index, z_weight, logit_softcap, vocabulary or Vocabulary(), compiled)
    with torch.autocast(device_type, enabled=False):
        if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
            return _LinearCrossEntropy.apply(hidden, weight, targets, *settings)  # pyright: ignore[reportReturnType]
        total, _, _ = _chunked(hidden, weight, targets, *settings, wanted=(False, False))
        return total / _count(targets, ignore_index)


class Vocabulary:
    """The loss's view of the ids that a matrix has rows for: here all ids."""

    def softmax(self, logits: Tensor, targets: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The targets' logits, logsumexp and probabilities of a chunk; overwrites logits that are already in `wide`.

        Targets, their logits and logsumexp have one column.
        """
        target_logits = logits.gather(1, targets).to(wide)
        largest = logits.amax(dim=1, keepdim=True).to(wide)
        # Widened here and not by softmax, which would hold the widened logits and the result.
        widened = logits.to(wide)
        probabilities = torch.softmax(widened, dim=1, out=widened)
        # log(largest probability) = largest logit - logsumexp, so softmax's sum of exponentials serves for logsumexp
        # too. The largest probability is at least 1/vocab_size, so its logarithm is safe.
        logsumexp = largest - probabilities.amax(dim=1, keepdim=True).log()
        return target_logits, logsumexp, probabilities

    def subtract_targets(self, probabilities: Tensor, targets: Tensor) -> None:
        """probabilities - onehot(targets), in place."""
        probabilities.scatter_(1, targets, probabilities.gather(1, targets) - 1)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, *settings: Any) -> Tensor:
        total, grad_hidden, grad_weight = _chunked(hidden, weight, targets, *settings, wanted=ctx.needs_input_grad[:2])
        count = _count(targets, settings[2])
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.save_for_backward(grad_hidden, grad_weight, count)
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *gradients, count = ctx.saved_tensors
        # Dividing by the count only now keeps fp16 gradients of a scaled loss from underflowing before the scale
        # reaches them.
        factor = grad_outputs[0] / count
        return (*scaled(gradients, factor, ctx.dtypes), *[None] * 8)


def _chunked(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    dtype: torch.dtype,
    chunk_size: int,
    ignore_index: int,
    z_weight: float,
    logit_softcap: float | None,
    vocabulary: Vocabulary,
    compiled: bool,
    *,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The sum of the losses, and its gradients with respect to hidden and weight where `wanted`."""
    wide = torch.promote_types(dtype, torch.float32)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    total = torch.zeros((), dtype=wide, device=hidden.device)
    in_loops = compiled and type(vocabulary) is Vocabulary and is_computed(hidden, weight)
    if in_loops and not any(wanted) and takes_head_rows(hidden, weight):
        counts = (targets != ignore_index).unsqueeze(1)
        chosen = targets.unsqueeze(1).where(counts, 0)
        target_logits, logsumexp = head_rows(hidden, weight, chosen, logit_softcap or 0.0)
        return _sum_of_losses(target_logits, logsumexp, counts, z_weight), None, None
    grad_hidden = torch.empty_like(hidden) if wanted[0] else None
    grad_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
    # One place for all chunks: where freed memory is not kept, mapping a new one takes a fifth of its product's time.
    room = hidden.new_empty(min(chunk_size, len(hidden)), len(weight)) if in_loops else None
    for start in range(0, len(hidden), chunk_size):
        rows = slice(start, start + chunk_size)
        counts = (targets[rows] != ignore_index).unsqueeze(1)
        chosen = targets[rows].unsqueeze(1).where(counts, 0)
        # A row of zeros adds nothing to the weight's gradient: cheaper here than clearing a row of logits later.
        inputs = hidden[rows].masked_fill(~counts, 0)
        if room is not None:
            gradient = torch.mm(inputs, weight.T, out=room[: len(inputs)])
            with early_gradient() if any(wanted) else nullcontext():
                target_logits, logsumexp, _ = loss_rows_(
                    gradient, chosen, logit_softcap or 0.0, z_weight, any(wanted), False
                )
        else:
            logits = inputs @ weight.T
            target_logits, logsumexp, gradient = _plain_loss_rows(
                logits, chosen, logit_softcap, z_weight, vocabulary, wide, with_gradient=any(wanted)
            )
            # Tensors that are freed early are not alive together with the next ones.
            del logits
        total += _sum_of_losses(target_logits, logsumexp, counts, z_weight)
        if not any(wanted):
            continue
        with early_gradient():
            gradient = gradient.to(dtype)
            if grad_hidden is not None:
                torch.mm(gradient, weight, out=grad_hidden[rows])
                grad_hidden[rows].masked_fill_(~counts, 0)
            if grad_weight is not None:
                add_product_(grad_weight, gradient, inputs, in_loops=in_loops)
        del gradient
    return total, grad_hidden, grad_weight


def _sum_of_losses(target_logits: Tensor, logsumexp: Tensor, counts: Tensor, z_weight: float) -> Tensor:
    losses = logsumexp - target_logits
    if z_weight:
        losses += z_weight * logsumexp.square()
    return losses.where(counts, 0).sum()


def add_product_(total: Tensor, gradient: Tensor, inputs: Tensor, *, in_loops: bool) -> None:
    """total += gradientᵀ · inputs, where the total may be wider than the product.

    On a GPU nothing else is written: the product is added up in the total's format, in its place.
    """
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.T, inputs)
    elif in_loops and gradient.dtype == torch.bfloat16:
        add_narrow_(total, gradient.T @ inputs)
    elif adds_wide_products(total):
        torch.addmm(total, gradient.T, inputs, out_dtype=total.dtype, out=total)
    else:
        total += gradient.T @ inputs


def _plain_loss_rows(
    logits: Tensor,
    targets: Tensor,
    softcap: float | None,
    z_weight: float,
    vocabulary: Vocabulary,
    wide: torch.dtype,
    *,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The targets' logits and logsumexp, one column each, and the gradient of the sum of losses with respect to the
    logits, in `wide`: meaningless unless wanted. The logits are overwritten."""
    slopes = None if softcap is None else bound_(logits, softcap, with_slopes=with_gradient)
    target_logits, logsumexp, probabilities = vocabulary.softmax(logits, targets, wide)
    if with_gradient:
        with early_gradient():
            if z_weight:
                # The gradient of logsumexp² is 2 · logsumexp · softmax.
                probabilities *= 1 + 2 * z_weight * logsumexp
            vocabulary.subtract_targets(probabilities, targets)
            if slopes is not None:
                probabilities *= slopes
    return target_logits, logsumexp, probabilities


def _count(targets: Tensor, ignore_index: int) -> Tensor:
    return (targets != ignore_index).sum().clamp(min=1)


def bound_(logits: Tensor, cap: float, *, with_slopes: bool) -> Tensor | None:
    """Bound logits in place; the derivative of cap · tanh(x / cap), which is 1 - tanh², if it is wanted."""
    logits.div_(cap).tanh_()
    slopes = logits.square().neg_().add_(1) if with_slopes else None
    logits.mul_(cap)
    return slopes


def _fake_loss_rows(
    logits: Tensor, targets: Tensor, softcap: float, z_weight: float, with_gradient: bool, with_entropies: bool
) -> tuple[Tensor, Tensor, Tensor]:
    column = targets.shape
    target_logits, logsumexps = (logits.new_empty(column, dtype=torch.float32) for _ in range(2))
    entropies = logits.new_empty(column if with_entropies else (column[0], 0), dtype=torch.float32)
    return target_logits, logsumexps, entropies


@cpu_operator(
    "compiled_loss_rows_(Tensor(a!) logits, Tensor targets, float softcap, float z_weight, bool with_gradient, "
    "bool with_entropies) -> (Tensor, Tensor, Tensor)",
    _fake_loss_rows,
)
def loss_rows_(
    logits: Tensor, targets: Tensor, softcap: float, z_weight: float, with_gradient: bool, with_entropies: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the targets' logits, logsumexp and, if wanted, entropies of rows of logits [n, vocab_size], one column
    each.

    Targets have one column. Logits are bounded by a softcap unless it is 0. with_gradient, they become the gradient of
    logsumexp - target's logit + z_weight · logsumexp², in place.
    """
    results = _fake_loss_rows(logits, targets, softcap, z_weight, with_gradient, with_entropies)
    n_rows, n = logits.shape
    targets, options = _known_targets(targets, n), (softcap, z_weight, with_gradient, with_entropies)
    before = logits, is_bf16(logits), targets, *results
    on_threads("loss.numba_loss.loss_rows", before, (n, *options), n_rows=n_rows, n_columns=n, buffer_size=3 * n)
    return results


def takes_head_rows(hidden: Tensor, weight: Tensor) -> bool:
    """True if `head_rows` supports those matrices and is the fastest form; if nothing was timed, for as many rows as a
    chunk of logits has, on a processor with AVX512-BF16 but without AMX."""
    (n_rows, width), vocab_size = hidden.shape, len(weight)
    if not (hidden.dtype == weight.dtype == torch.bfloat16 and is_computed(hidden, weight)) or width % MULTIPLE:
        return False
    default = "tiles" if multiplies_pairs() and n_rows >= CHUNK_SIZE else "chunks"
    return fastest_form(HEAD, class_of_head(n_rows, width, vocab_size), default) == "tiles"


def class_of_head(n_rows: int, width: int, vocab_size: int) -> ShapeClass:
    """The class of a head without a gradient; more rows and larger vocabularies than these are alike."""
    return (min(n_rows, CHUNK_SIZE), width, min(vocab_size, MOST_WORDS))


def _fake_head_rows(input: Tensor, weight: Tensor, targets: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
    target_logits, logsumexps = (input.new_empty(targets.shape, dtype=torch.float32) for _ in range(2))
    return target_logits, logsumexps


@cpu_operator(
    "compiled_head_rows(Tensor input, Tensor weight, Tensor targets, float softcap) -> (Tensor, Tensor)",
    _fake_head_rows,
)
def head_rows(input: Tensor, weight: Tensor, targets: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
    """Compute the targets' logits and logsumexp of the rows of input · weightᵀ in fp32, one column each; both matrices
    are bf16, and no logit is written to memory.

    Targets have one column. Logits are bounded by a softcap unless it is 0.
    """
    results = _fake_head_rows(input, weight, targets, softcap)
    (n_rows, width), vocab_size = input.shape, len(weight)
    targets = _known_targets(targets, vocab_size)
    columns = min(max(_BLOCK_NUMBERS // width // MULTIPLE, 1) * MULTIPLE, _BLOCK_COLUMNS)
    on_threads(
        "loss.numba_head.head_rows",
        (input, weight, targets, *results),
        (vocab_size, width, columns, softcap),
        n_rows=n_rows,
        n_columns=vocab_size,
        # A block of the weight and its logits, eight rows, and the largest logit of each row.
        buffer_size=columns * (width // 2 + 8) + 4 * width + n_rows,
    )
    return results


def _known_targets(targets: Tensor, vocab_size: int) -> Tensor:
    """The targets as compiled loops read them, which check nothing: int64, without gaps.

    Raises IndexError for targets outside of the vocabulary.
    """
    smallest, largest = (int(end) for end in targets.aminmax()) if len(targets) else (0, 0)
    if smallest < 0 or largest >= vocab_size:
        raise IndexError(f"targets from {smallest} to {largest} are outside of a vocabulary of {vocab_size}")
    return targets.to(torch.int64).contiguous()


@cpu_operator("compiled_add_(Tensor(a!) total, Tensor part) -> ()", lambda total, part: None)
def add_narrow_(total: Tensor, part: Tensor) -> None:
    """total += part, fp32 and bf16, without a wide copy of the part."""
    on_threads("loss.numba_loss.add_narrow", (total, part), (), n_rows=total.numel(), n_columns=1)


def fused_linear_cross_entropy(
    hidden: Float[Tensor, "n d_model"],
    weight: Float[Tensor, "vocab_size d_model"],
    targets: Int[Tensor, " n"],
    *,
    chunk_size: int | None = None,
    ignore_index: int = -1,
    z_weight: float = 0.0,
    logit_softcap: float | None = None,
    narrow_weight: Float[Tensor, "vocab_size d_model"] | None = None,
) -> Float[Tensor, ""]:
    """`napkin.kernels.linear_cross_entropy` for a GPU, with the same formats: under autocast products in its dtype.

    `narrow_weight` is the weight in that dtype, where somebody has it already.
    """
    device_type = hidden.device.type
    dtype = dtype_of_product(hidden, weight)
    chunk_size = chunk_size or chunk_size_of(weight)
    settings = (narrow_weight, dtype, chunk_size, ignore_index, z_weight, logit_softcap or 0.0)
    with torch.autocast(device_type, enabled=False):
        return _FusedCrossEntropy.apply(hidden, weight, targets, *settings)  # pyright: ignore[reportReturnType]


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, *settings: Any) -> Tensor:
        narrow_weight, dtype, chunk_size, ignore_index, z_weight, softcap = settings
        ctx.dtypes = hidden.dtype, weight.dtype
        hidden, weight = hidden.to(dtype), weight.to(dtype) if narrow_weight is None else narrow_weight
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        count = (targets != ignore_index).sum().clamp(min=1)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, start + chunk_size)
            logits = hidden[rows] @ weight.T
            total += _in_place(
                logits, targets[rows], ignore_index, z_weight, softcap, wants_hidden or wants_weight
            ).sum()
            with early_gradient():
                if grad_hidden is not None:
                    torch.mm(logits, weight, out=grad_hidden[rows])
                if grad_weight is not None:
                    add_product_(grad_weight, logits, hidden[rows], in_loops=False)
            # Freed before the next chunk's are allocated.
            del logits
        ctx.save_for_backward(grad_hidden, grad_weight, count)
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *gradients, count = ctx.saved_tensors
        # Divided only now, as in `linear_cross_entropy`: fp16 gradients of a scaled loss must not underflow before.
        return (*scaled(gradients, grad_outputs[0] / count, ctx.dtypes), *[None] * 7)


def in_place_reference(
    logits: Tensor, targets: Tensor, ignore_index: int, z_weight: float, softcap: float, wants_gradient: bool
) -> Tensor:
    """The loss of each row, 0 where its target is ignored; the logits become the gradient of their sum, if wanted."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    bounded = torch.tanh(wide / softcap) if softcap else None
    wide = wide if bounded is None else softcap * bounded
    counts = (targets != ignore_index)[:, None]
    chosen = targets[:, None].where(counts, 0)
    logsumexp = wide.logsumexp(dim=1, keepdim=True)
    losses = (logsumexp - wide.gather(1, chosen) + z_weight * logsumexp.square()).where(counts, 0)
    if wants_gradient:
        slope = (wide - logsumexp).exp() * (1 + 2 * z_weight * logsumexp)
        slope.scatter_add_(1, chosen, -torch.ones_like(losses))
        slope = slope if bounded is None else slope * (1 - bounded.square())
        logits.copy_(slope.where(counts, 0))
    return losses[:, 0]


_in_place = operator(
    "fused_cross_entropy_(Tensor(a!) logits, Tensor targets, int ignore_index, float z_weight, float softcap, "
    "bool wants_gradient) -> Tensor",
    fake=lambda logits, *others: logits.new_empty(len(logits), dtype=torch.promote_types(logits.dtype, torch.float32)),
    triton="loss.triton_cross_entropy.cross_entropy_in_place",
)(in_place_reference)
