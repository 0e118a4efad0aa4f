"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks"): token by token, and by chunks.

As in `state_space.py` a head's state [state_size, head_dim] decays and is read with queries. A token does not add its
value, but a part `rate` of what its value differs from that which the state has under its key:

    S[t] = D + key[t] ⊗ rate[t] · (value[t] - key[t] · D)    with D = exp(log_decay[t]) · S[t-1]

Within a chunk the differences depend on each other: u[i] + Σ_{j<i} rate[i] · decay(j, i) · (key[i] · key[j]) · u[j] =
rate[i] · (value[i] - key[i] · S), a triangular system (the WY form). Its solution has a part of the values alone and a
part that is linear in the state S before the chunk, which is known when the chunk's turn comes.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from napkin.kernels.operators import in_autocast_dtype
from napkin.kernels.recurrences import CHUNK
from napkin.kernels.recurrences.state_space import (
    Documents,
    Keys,
    LogDecay,
    State,
    Values,
    chunk_decays,
    token_decays,
    whole_chunks,
)

Rates = Float[Tensor, "batch position heads"]


def plain_delta_rule(
    queries: Keys,
    keys: Keys,
    values: Values,
    log_decay: LogDecay,
    rates: Rates,
    *,
    state: State | None = None,
    documents: Documents = None,
    document_before: Int[Tensor, " batch"] | None = None,
) -> tuple[Values, State]:
    """The recurrence as it is written, a token at a time: the outputs, and the state after the last token.

    States and documents are as in `plain_scan`.
    """
    heads = values.shape[2]
    queries, keys = (each.repeat_interleave(heads // each.shape[2], dim=2) for each in (queries, keys))
    if state is None:
        state = values.new_zeros(values.shape[0], heads, keys.shape[-1], values.shape[-1])
    outputs = []
    for t, decay in enumerate(token_decays(log_decay, documents, document_before)):
        y, state = delta_step(queries[:, t], keys[:, t], values[:, t], decay, rates[:, t], state)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


def delta_step(
    queries: Float[Tensor, "batch groups state_size"],
    keys: Float[Tensor, "batch groups state_size"],
    values: Float[Tensor, "batch heads head_dim"],
    decay: Float[Tensor, "batch heads"],
    rates: Float[Tensor, "batch heads"],
    state: State,
) -> tuple[Float[Tensor, "batch heads head_dim"], State]:
    """One token of the recurrence: its output, and the state after it."""
    heads = values.shape[1]
    queries, keys = (each.repeat_interleave(heads // each.shape[1], dim=1).to(state.dtype) for each in (queries, keys))
    state = decay[..., None, None] * state
    difference = rates[..., None] * (values.to(state.dtype) - (keys[:, :, None] @ state)[:, :, 0])
    state = state + keys[..., None] * difference[:, :, None]
    return (queries[:, :, None] @ state)[:, :, 0].to(values.dtype), state


def chunked_delta_rule(
    queries: Keys,
    keys: Keys,
    values: Values,
    log_decay: LogDecay,
    rates: Rates,
    *,
    state: State | None = None,
    documents: Documents = None,
    document_before: Int[Tensor, " batch"] | None = None,
    chunk: int = CHUNK,
) -> tuple[Values, State]:
    """`plain_delta_rule` by chunks: products and a triangular system within each, a recurrence over states between.

    Decays, systems and states are in log_decay's dtype, fp32 or wider; the products of queries and keys are in that of
    the values or, under autocast, autocast's.
    """
    queries, keys, values = in_autocast_dtype(queries, keys, values)
    batch, length, heads, head_dim = values.shape
    dtype, wide = values.dtype, log_decay.dtype
    chunk = min(chunk, length)
    tensors = queries, keys, values, log_decay, rates
    (queries, keys, values, log_decay, rates), documents = whole_chunks(tensors, documents, chunk)
    n_chunks = values.shape[1] // chunk

    def by_chunk(x: Tensor) -> Tensor:
        """[batch, position, heads, ...] as [batch, chunk, head, token, ...]; groups are repeated for their heads."""
        x = x.repeat_interleave(heads // x.shape[2], dim=2)
        return x.unflatten(1, (n_chunks, chunk)).transpose(2, 3)

    with torch.autocast(values.device.type, enabled=False):
        queries, keys, values, rates = (by_chunk(each) for each in (queries, keys, values, rates[..., None]))
        decays = chunk_decays(
            log_decay.unflatten(1, (n_chunks, chunk))[:, :, :, None],
            None if documents is None else documents.unflatten(1, (n_chunks, chunk)),
            document_before,
        )
        within = decays.within[:, 0].unflatten(0, (batch, n_chunks))
        from_start, to_end = (
            each[:, :, 0].unflatten(0, (batch, n_chunks)).transpose(2, 3)[..., None]
            for each in (decays.from_start, decays.to_end)
        )
        # The system is unitriangular: its diagonal, and what is above, is not read.
        system = rates * (keys @ keys.mT).to(wide) * within
        knowns = torch.cat((rates * values.to(wide), rates * from_start * keys.to(wide)), dim=-1)
        of_values, of_state = torch.linalg.solve_triangular(
            system.tril(-1), knowns, upper=False, unitriangular=True
        ).split((head_dim, keys.shape[-1]), dim=-1)
        scores = (queries @ keys.mT).to(wide) * within
        read, written = from_start * queries.to(wide), (to_end * keys.to(wide)).mT

        if state is None:
            state = log_decay.new_zeros(batch, heads, keys.shape[-1], head_dim)
        current, outputs = state.to(wide), []
        for number in range(n_chunks):
            differences = of_values[:, number] - of_state[:, number] @ current
            outputs.append(read[:, number] @ current + scores[:, number] @ differences)
            current = decays.whole[:, number, 0, :, None, None] * current + written[:, number] @ differences
        y = torch.stack(outputs, dim=1).transpose(2, 3).flatten(1, 2)
    return y[:, :length].to(dtype), current
