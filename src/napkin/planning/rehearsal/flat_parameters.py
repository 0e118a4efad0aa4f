"""A stand-in for FullyShardedDataParallel: the same modules are sharded by `fully_shard`.

The older of torch's two shardings makes a flat parameter of each wrapped module, and needs a GPU's streams for it. What
a rank keeps, gathers and sends is the same by `fully_shard`, but for the padding of parameters and the copies that flat
parameters save.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, no_type_check

import torch.distributed as dist
from torch import nn


@no_type_check
def stand_in_for_flat_parameters(note: Callable[[str], None]) -> None:
    """Put the stand-in in place of `torch.distributed.fsdp.FullyShardedDataParallel`."""
    from torch.distributed import device_mesh, fsdp
    from torch.distributed.fsdp import fully_sharded_data_parallel as flat

    class FullyShardedDataParallel(nn.Module):
        def __init__(
            self,
            module: nn.Module,
            process_group: Any = None,
            sharding_strategy: Any = None,
            cpu_offload: Any = None,
            auto_wrap_policy: Any = None,
            backward_prefetch: Any = None,
            mixed_precision: Any = None,
            *_: Any,
            **__: Any,
        ) -> None:
            super().__init__()
            self.module: Any
            note("FullyShardedDataParallel is counted as fully_shard of the same modules")
            strategy = getattr(sharding_strategy, "name", "FULL_SHARD")
            self.module = module.cuda()
            if strategy == "NO_SHARD":
                self.module = nn.parallel.DistributedDataParallel(self.module)
                return
            precision = mixed_precision
            options = {
                "mesh": device_mesh.init_device_mesh("cuda", (dist.get_world_size(process_group),)),
                # None: reshard after the forward pass except for the outermost module, as FullyShardedDataParallel
                # does.
                "reshard_after_forward": False if "GRAD_OP" in strategy else None,
                "mp_policy": fsdp.MixedPrecisionPolicy(
                    param_dtype=getattr(precision, "param_dtype", None),
                    reduce_dtype=getattr(precision, "reduce_dtype", None),
                    cast_forward_inputs=True,
                ),
            }
            if getattr(cpu_offload, "offload_params", False):
                note("parameters that it offloads are counted on the GPU")
            for part in _wrapped(self.module, auto_wrap_policy):
                fsdp.fully_shard(part, **options)
            fsdp.fully_shard(self.module, **options)

        def forward(self, *inputs: Any, **named: Any) -> Any:
            return self.module(*inputs, **named)

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("module"), name)

        def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Any:
            return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

        @contextlib.contextmanager
        def no_sync(self) -> Iterator[None]:
            self.module.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                self.module.set_requires_gradient_sync(True)

        @staticmethod
        def state_dict_type(*_: Any, **__: Any) -> Any:
            return contextlib.nullcontext()

        summon_full_params = state_dict_type

        @staticmethod
        def set_state_dict_type(*_: Any, **__: Any) -> None: ...

        @staticmethod
        def optim_state_dict(_: nn.Module, optimizer: Any, *__: Any, **___: Any) -> dict[str, Any]:
            return optimizer.state_dict()

        full_optim_state_dict = sharded_optim_state_dict = optim_state_dict

        @staticmethod
        def fsdp_modules(module: nn.Module, **_: Any) -> list[nn.Module]:
            return [part for part in module.modules() if isinstance(part, fsdp.FSDPModule)]

    fsdp.FullyShardedDataParallel = flat.FullyShardedDataParallel = FullyShardedDataParallel


@no_type_check
def _wrapped(module: nn.Module, policy: Any) -> list[nn.Module]:
    """The modules inside of `module` that a policy wraps, inner ones first."""
    if policy is None:
        return []
    if not callable(policy) or hasattr(policy, "_run_policy"):
        wrapped = policy._run_policy(module, set(), {})
        return [part for part in reversed(list(module.modules())) if part in wrapped and part is not module]
    chosen: list[nn.Module] = []
    for part in reversed(list(module.modules())):
        numbers = {parameter for each in chosen if each in set(part.modules()) for parameter in each.parameters()}
        left = sum(each.numel() for each in part.parameters() if each not in numbers)
        if part is not module and left and policy(module=part, recurse=False, nonwrapped_numel=left):
            chosen.append(part)
    return chosen
