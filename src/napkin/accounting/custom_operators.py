"""FLOPs and bytes of operators that are not torch's own: what their author declares.

    @register_operator("mylib::fused_mlp")
    def fused_mlp(x, up, down):
        return 2 * x.numel() * (up.shape[0] + down.shape[1])

A count, a plan and a meter then know the operator. An operator that is not declared is counted in calls and named, in
`Ledger.unknown_operators`. What a library has registered with torch's own `register_flop_formula` is used as well.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch._library.custom_ops import CustomOpDef
from torch.utils.flop_counter import flop_registry

from napkin.accounting.contractions import Work
from napkin.errors import NapkinError, first_line


@dataclass(frozen=True, kw_only=True)
class OperatorWork:
    """The work of one call of a custom operator."""

    flops: int = 0
    """FLOPs of its products: a multiply and an add are two."""
    elementwise_flops: int = 0
    """Elementwise FLOPs, one per element of work that is not a matrix product; `flops` does not include them."""
    bytes_read: int | None = None
    """Bytes that a call reads; None is the bytes of all its tensor arguments."""
    bytes_written: int | None = None
    """Bytes that a call writes; None is those of all tensors that it returns or that its schema says it writes to."""
    scratch_bytes: int = 0
    """Bytes that it takes while it runs, and gives back."""
    causal_flops: int | None = None
    """FLOPs that a causal mask leaves; None is all."""
    recomputed_flops: int = 0
    """FLOPs that compute again what an earlier operator computed; in no MFU."""
    contraction: tuple[int, int, int, int] | None = None
    """(batch, m, n, k) of the product that it is priced as; None is a square one of as many FLOPs."""

    @property
    def work(self) -> Work | None:
        """The call as the tables of contractions describe one; None where it multiplies nothing."""
        if not self.flops:
            return None
        causal = self.flops if self.causal_flops is None else self.causal_flops
        return Work(self.flops, self.contraction or _square(self.flops), causal, self.recomputed_flops)


Formula = Callable[..., "int | OperatorWork"]
_Function = TypeVar("_Function", bound=Formula)

_FORMULAS: dict[torch._ops.OpOverloadPacket, Formula] = {}


def register_operator(operator: Any) -> Callable[[_Function], _Function]:
    """Decorate the function that declares the work of a call of `operator`.

    Args:
        operator: `"namespace::name"`, `torch.ops.namespace.name`, or what `torch.library.custom_op` returned.

    The function is called with the operator's arguments by their names, defaults included, and with `result` if it has
    a parameter of that name. It returns the FLOPs as a whole number, or an `OperatorWork`. Tensors may be fake: they
    have shapes and formats, no values. The gradient of a custom operator is an operator of its own. A later
    registration replaces an earlier one.

    Raises NapkinError for an operator that does not exist, for one of torch's own, which the tables have, and for a
    function whose parameters are not the operator's.
    """
    packet = _packet(operator)
    name = packet._qualified_op_name
    if name.startswith(("aten::", "prim::", "prims::", "c10d::", "_c10d_functional::")):
        raise NapkinError(f"register_operator: '{name}' is torch's own: napkin.count has its FLOPs")

    def register(function: _Function) -> _Function:
        _check_parameters(name, packet, function)
        _FORMULAS[packet] = function
        return function

    return register


def declared_work(operator: torch._ops.OpOverload, args: tuple, kwargs: dict, result: Any) -> OperatorWork | None:
    """The work that an operator's author has declared for this call; None for an undeclared operator. Raises
    NapkinError where the declaration fails, or gives impossible values.
    """
    formula = _FORMULAS.get(operator.overloadpacket)
    if formula is None:
        if operator.namespace != "aten" and operator.overloadpacket in flop_registry:
            return OperatorWork(flops=int(flop_registry[operator.overloadpacket](*args, **kwargs, out_val=result)))
        return None
    schema = operator._schema.arguments
    arguments = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    arguments |= dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
    if "result" in inspect.signature(formula).parameters and "result" not in arguments:
        arguments["result"] = result
    try:
        work = formula(**arguments)
        declared = work if isinstance(work, OperatorWork) else OperatorWork(flops=_whole(work))
        for name, value in vars(declared).items():
            if name != "contraction" and value is not None:
                declared = replace(declared, **{name: _whole(value)})
    except NapkinError:
        raise
    except Exception as error:
        raise NapkinError(
            f"the function registered for '{operator.overloadpacket._qualified_op_name}' fails "
            f"({type(error).__name__}: {first_line(error)}): it has to return FLOPs, 0 or more, or an OperatorWork"
        ) from error
    return declared


def _packet(operator: Any) -> torch._ops.OpOverloadPacket:
    if isinstance(operator, CustomOpDef):
        operator = operator._opoverload
    if isinstance(operator, torch._ops.OpOverload):
        return operator.overloadpacket
    if isinstance(operator, torch._ops.OpOverloadPacket):
        return operator
    namespace, separator, name = str(operator).partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None) if separator and name else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        raise NapkinError(
            f"register_operator: there is no operator '{operator}': import what defines it first, and name it as "
            "'namespace::name'"
        )
    return packet


def _check_parameters(name: str, packet: torch._ops.OpOverloadPacket, function: Formula) -> None:
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    for overload in packet.overloads():
        arguments = [argument.name for argument in getattr(packet, overload)._schema.arguments]
        if missing := [argument for argument in arguments if argument not in parameters]:
            raise NapkinError(
                f"register_operator: '{name}' has the arguments {', '.join(arguments)}, and the function lacks "
                f"{', '.join(missing)}: name them, or take **others"
            )


def _whole(value: Any) -> int:
    if isinstance(value, bool) or int(value) != value or value < 0:
        raise ValueError(f"{value!r} is not a whole number of 0 or more")
    return int(value)


def _square(flops: int) -> tuple[int, int, int, int]:
    side = max(1, round((flops / 2) ** (1 / 3)))
    return 1, side, side, side
