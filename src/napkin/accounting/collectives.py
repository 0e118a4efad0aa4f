"""Operators of torch.distributed in a ledger: which collective a call is, how many bytes it moves, and among whom."""

from typing import Any, no_type_check

from torch import Tensor

from napkin.accounting.collective_call import CollectiveCall

DISTRIBUTED = frozenset({"c10d", "_c10d_functional"})
"""Namespaces of the operators of torch.distributed: those that write into tensors, and those that return new ones."""


@no_type_check
def needs_other_ranks(operator: Any) -> bool:
    """Whether a call of an operator waits for other ranks: it cannot be timed alone."""
    return operator.namespace in DISTRIBUTED or operator.overloadpacket.__name__.startswith("ring_attention")


# By parts of an operator's name. Of tensors in both directions, the larger are the whole tensor.
_OPERATIONS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "isend": "send",
    "send": "send",
    "irecv": "receive",
    "recv": "receive",
    "broadcast": "broadcast",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
}


# Runs for every operator of torch.distributed in a step.
@no_type_check
def collective_of(operator: Any, args: tuple, kwargs: dict) -> CollectiveCall | None:
    """The collective that a call is; None for any other operator, and for waiting for one."""
    if operator.namespace not in DISTRIBUTED:
        return None
    name = operator.overloadpacket.__name__.strip("_")
    operation = next((found for part, found in _OPERATIONS.items() if name.startswith(part)), None)
    if operation is None:
        return None
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    sums = {name: _bytes_of(value) for name, value in given.items() if not isinstance(value, str)}
    ranks = _ranks_of(given)
    if operation == "all_to_all":
        data_bytes = next(size for name, size in sums.items() if name.startswith("input"))
    else:
        data_bytes = max(sums.values())
    if operator.namespace == "_c10d_functional" and operation == "all_gather":
        # The operator returns the whole tensor.
        data_bytes = max(data_bytes, len(ranks) * next(iter(sums.values())))
    peer = given.get("dst", given.get("src")) if operation in ("send", "receive") else None
    return CollectiveCall(operation, data_bytes, ranks, None if peer is None else ranks[peer])


def _bytes_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_bytes_of, value)) if isinstance(value, (list, tuple)) else 0


@no_type_check
def _ranks_of(given: dict[str, Any]) -> tuple[int, ...]:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group

    group = given.get("process_group")
    if group is not None:
        group = dist.ProcessGroup.unbox(group)
    elif isinstance(given["group_name"], str):
        group = _resolve_process_group(given["group_name"])
    else:
        group = given["group_name"]
    return tuple(dist.get_process_group_ranks(group))
