"""Any torch module on several ranks, in a training loop of one's own: data parallelism, shards, a sharded optimizer.

`torchrun` starts the ranks and `torch.distributed.init_process_group` joins them; each rank then computes its own rows
of a batch:

    model = DDP(module)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    loss(model(own_rows)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

Gradients are means over ranks: with a loss that is a mean over as many rows on each rank, a step is that of a single
process with all rows. napkin's own runs are divided by `sharding.py`, which knows more of their model.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import default_pg_timeout

from napkin.distributed.process_group import ProcessGroupRanks
from napkin.distributed.ranks import RankInfo
from napkin.distributed.sharding import balanced, broadcast_from_owners
from napkin.errors import NapkinError
from napkin.optim.saved_state import full_tensor

Group = dict[str, Any]


class DDP(nn.Module):
    """A module that each rank holds whole, whose gradients are averaged while the backward pass still computes others.

    Gradients are copied into buckets in the reverse order of the parameters, which is about the order in which they
    come; a bucket is all-reduced as soon as it is full, on all ranks in the same order. A parameter that only some
    ranks used has a gradient of 0 on the others; one that none used keeps None.
    """

    def __init__(
        self, module: nn.Module, *, bucket_bytes: float = 25e6, process_group: dist.ProcessGroup | None = None
    ) -> None:
        """Parameters and buffers become those of the first rank. A collective, as all of its methods are."""
        super().__init__()
        self.module = module
        self._group = process_group
        self._world_size = dist.get_world_size(process_group)
        _broadcast_from_first(module, process_group)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._buckets = [_Bucket(each) for each in _buckets(reversed(trained), bucket_bytes)]
        self._bucket_of: dict[Tensor, _Bucket] = {
            parameter: bucket for bucket in self._buckets for parameter in bucket.parameters
        }
        self._n_sent = 0
        self._is_synchronized = True
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._has_gradient)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.module(*arguments, **named)

    def finish_gradient_synchronization(self) -> None:
        """Wait until all gradients are the means over ranks; called between the backward pass and the update."""
        self._send(len(self._buckets))
        for bucket in self._buckets:
            bucket.receive(self._world_size)
        self._n_sent = 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes in this block add up on their rank: all micro-batches of a step but the
        last."""
        self._is_synchronized = False
        try:
            yield
        finally:
            self._is_synchronized = True

    def _has_gradient(self, parameter: Tensor) -> None:
        if not self._is_synchronized:
            return
        bucket = self._bucket_of[parameter]
        if parameter in bucket.ready:
            raise NapkinError(
                "a second backward pass has begun before finish_gradient_synchronization(): call it after each "
                "backward pass, or put those that add up into `with model.no_sync():`"
            )
        bucket.ready.add(parameter)
        # Ranks may fill their buckets in another order, but have to send them in the same one.
        full = next((at for at, each in enumerate(self._buckets) if not each.is_full), len(self._buckets))
        self._send(full)

    def _send(self, end: int) -> None:
        for bucket in self._buckets[self._n_sent : end]:
            bucket.send(self._group)
        self._n_sent = max(self._n_sent, end)


class _Bucket:
    """Gradients of one format on one device that are sent together."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.ready: set[Tensor] = set()
        self._sent: tuple[Tensor, dist.Work] | None = None

    @property
    def is_full(self) -> bool:
        return len(self.ready) == len(self.parameters)

    def send(self, group: dist.ProcessGroup | None) -> None:
        """Begin to add up the gradients over ranks; behind them, on how many ranks each parameter has one."""
        pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        used = pieces[0].new_tensor([float(p.grad is not None) for p in self.parameters])
        flat = torch.cat([*(each.flatten() for each in pieces), used])
        work = dist.all_reduce(flat, ReduceOp.SUM, group, async_op=True)
        self._sent = flat, cast(dist.Work, work)

    def receive(self, world_size: int) -> None:
        """Wait for the sums, and make the parameters' gradients their means."""
        assert self._sent is not None
        flat, work = self._sent
        work.wait()
        *sums, used = flat.split([*(p.numel() for p in self.parameters), len(self.parameters)])
        for parameter, total, ranks in zip(self.parameters, sums, used.tolist(), strict=True):
            if ranks:
                mean = total.view_as(parameter).div_(world_size)
                parameter.grad = mean.clone() if parameter.grad is None else parameter.grad.copy_(mean)
        self._sent = None
        self.ready.clear()


def _buckets(parameters: Iterable[nn.Parameter], most_bytes: float) -> list[list[nn.Parameter]]:
    """Neighbouring parameters of one format and device, at most so many bytes together unless it is a single one."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for each in parameters:
        kind = each.dtype, each.device
        if not buckets or size + each.nbytes > most_bytes or (buckets[-1][0].dtype, buckets[-1][0].device) != kind:
            buckets.append([])
            size = 0
        buckets[-1].append(each)
        size += each.nbytes
    return buckets


def _broadcast_from_first(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    tensors = [tensor.detach() for tensor in (*module.parameters(), *module.buffers()) if not tensor.is_meta]
    sending = [dist.broadcast(each, group=group, group_src=0, async_op=True) for each in tensors]
    for work in filter(None, sending):
        work.wait()


class FSDP(nn.Module):
    """A module of whose parameters, gradients and optimizer state each rank has a part: torch's FSDP2 around its
    layers.

    Parameters are DTensors afterwards, divided along their first dimension: give them to an optimizer after this.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        compute_dtype: torch.dtype | None = None,
        layers: Iterable[nn.Module] | None = None,
        replicated: Collection[nn.Parameter] = (),
    ) -> None:
        """Divide `module` among all ranks, after giving all the first rank's values. A collective.

        Each of `layers`, by default the modules of the outermost `nn.ModuleList` and `nn.Sequential`, is gathered while
        it computes; what is outside of them is gathered throughout. Parameters are gathered and used in
        `compute_dtype`, None is their own; gradients are added up in the format of the parameters. Each rank keeps the
        `replicated` ones whole, in their own format, such as gains of norms that compute in fp32.
        """
        super().__init__()
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        _broadcast_from_first(module, None)
        self.module = module
        kept = set(replicated)
        first = next(parameter for parameter in module.parameters() if parameter not in kept)
        mesh = init_device_mesh(first.device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=first.dtype)
        for each in (*(_layers(module) if layers is None else layers), module):
            if any(parameter not in kept for parameter in each.parameters()):
                fully_shard(each, mesh=mesh, mp_policy=policy, ignored_params=kept)
        self._replicated = [parameter for parameter in module.parameters() if parameter in kept]

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.module(*arguments, **named)

    def finish_gradient_synchronization(self) -> None:
        """Average the gradients of replicated parameters; those of the others are by the end of the backward pass."""
        for bucket in map(_Bucket, _buckets((p for p in self._replicated if p.requires_grad), 25e6)):
            bucket.send(None)
            bucket.receive(dist.get_world_size())

    def full_parameters(self) -> dict[str, Tensor]:
        """The parameters of the module by name, gathered from all ranks. A collective."""
        return {name: full_tensor(parameter.detach()) for name, parameter in self.module.named_parameters()}


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The modules in a module's lists, outermost ones only."""
    for child in module.children():
        yield from child.children() if isinstance(child, nn.ModuleList | nn.Sequential) else _layers(child)


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of any class, divided among ranks, each of which updates its part and keeps that part's state: stage
    1 of ZeRO (Rajbhandari et al. 2020).

    A rank updates whole parameters, about as many numbers as every other one, and then sends them to the others. All
    ranks must have the same parameters in the same order, and the same gradients.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        process_group: dist.ProcessGroup | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are those of `optimizer_class`."""
        self._process_group = process_group
        self._own: set[Tensor] = set()
        self._owners: dict[Tensor, int] = {}
        self.inner = optimizer_class(params, **settings)
        """The optimizer that updates this rank's parameters."""
        super().__init__([dict(group) for group in self.inner.param_groups], self.inner.defaults)
        self._divide(self.inner.param_groups)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update this rank's parameters and exchange all of them. A collective."""
        # Schedules write into the groups of this optimizer; some rules count in those of the inner one.
        self._copy_settings(self.param_groups, self.inner.param_groups)
        loss = self.inner.step(closure)
        self._copy_settings(self.inner.param_groups, self.param_groups)
        broadcast_from_owners(list(self._owners), list(self._owners.values()), self._process_group)
        return loss

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, which are divided among ranks separately."""
        super().add_param_group(param_group)
        # The constructor of the base class calls this for groups that the inner optimizer has already.
        if len(self.param_groups) > len(self.inner.param_groups):
            self.inner.add_param_group(dict(self.param_groups[-1]))
            self._divide(self.inner.param_groups[-1:])

    def state_dict(self) -> dict[str, Any]:
        """Settings, and the state that this rank has: see `full_state_dict`."""
        with self._all_parameters():
            return self.inner.state_dict()

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict that `optimizer_class` would have in a single process, on every rank. A collective, which also
        sends tensors of the CPU: with GPUs the process group's backend is "cpu:gloo,cuda:nccl"."""
        whole = self.state_dict()
        info = RankInfo(dist.get_rank(self._process_group), dist.get_world_size(self._process_group))
        described = {
            str(index): {
                key: [str(value.dtype), list(value.shape)] if isinstance(value, Tensor) else value
                for key, value in state.items()
            }
            for index, state in whole["state"].items()
        }
        ranks = ProcessGroupRanks(info, default_pg_timeout, self._process_group)
        described_by_rank = ranks.all_gather(described)
        state: dict[int, dict[str, Any]] = {}
        members = dist.get_process_group_ranks(self._process_group)
        for place, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            for key, value in described_by_rank[members.index(self._owners[parameter])].get(str(place), {}).items():
                if isinstance(value, list):
                    dtype, shape = getattr(torch, value[0].removeprefix("torch.")), value[1]
                    own = parameter in self._own
                    # torch keeps counts of steps on the CPU, which not every backend sends.
                    sent = (
                        whole["state"][place][key].to(parameter.device, copy=True)
                        if own
                        else torch.empty(shape, dtype=dtype, device=parameter.device)
                    )
                    dist.broadcast(sent, self._owners[parameter], self._process_group)
                    value = sent
                state.setdefault(place, {})[key] = value
        return {**whole, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a full state dict, or its own."""
        with self._all_parameters():
            self.inner.load_state_dict(state_dict)
        self._copy_settings(self.inner.param_groups, self.param_groups)

    def _divide(self, groups: list[Group]) -> None:
        """Let this rank own its part of the parameters of some groups of the inner optimizer."""
        parameters: list[Tensor] = [p for group in groups for p in group["params"]]
        ranks = dist.get_process_group_ranks(self._process_group)
        places = balanced([p.numel() for p in parameters], len(ranks))
        self._owners |= {p: ranks[place] for p, place in zip(parameters, places, strict=True)}
        self._own = {p for p, owner in self._owners.items() if owner == dist.get_rank()}
        self._keep_own()

    def _keep_own(self) -> None:
        for group in self.inner.param_groups:
            group["params"] = [p for p in group["params"] if p in self._own]
        for parameter in [p for p in self.inner.state if isinstance(p, Tensor) and p not in self._own]:
            del self.inner.state[parameter]
        self.state = self.inner.state

    @contextmanager
    def _all_parameters(self) -> Iterator[None]:
        """Let the inner optimizer have the parameters of all ranks in this block: those number its state."""
        for outer, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner["params"] = list(outer["params"])
        self._copy_settings(self.param_groups, self.inner.param_groups)
        try:
            yield
        finally:
            self._keep_own()

    @staticmethod
    def _copy_settings(source: list[Group], target: list[Group]) -> None:
        for given, taken in zip(source, target, strict=True):
            taken.update({key: value for key, value in given.items() if key != "params"})
