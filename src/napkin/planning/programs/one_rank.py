"""A program's own functions as one rank of many, in this process: on fake tensors and a fake process group.

The program may name CUDA devices and NCCL: its tensors are on the CPU here, and `count` does for them what the device
would do. Objects that ranks send to each other are kept, so that a rank that is traced later receives them. Everything
that is replaced is put back at the end of the block.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, no_type_check
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from napkin.accounting.collectives import DISTRIBUTED, collective_of
from napkin.accounting.counting import transformers_not_tracing
from napkin.accounting.ledger import CollectiveCall
from napkin.accounting.microbenchmark import runs_in
from napkin.distributed.fake_ranks import fake_ranks
from napkin.errors import NapkinError

aten = torch.ops.aten

MOST_BUILT = 2**22
"""The most elements of a tensor of integers that is real while a program is built."""


class AwaitsRank(BaseException):
    """A rank receives an object that another one has not sent yet: that one has to be traced first."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class Objects:
    """Objects that ranks have sent to each other, in order."""

    def __init__(self) -> None:
        self._sent: defaultdict[tuple[int, int], list[Any]] = defaultdict(list)
        self._received: Counter[tuple[int, int]] = Counter()

    def begin(self, rank: int) -> None:
        """A rank starts from the beginning: it sends and receives all again."""
        for pair in [pair for pair in self._sent if pair[0] == rank]:
            del self._sent[pair]
        for pair in [pair for pair in self._received if pair[1] == rank]:
            del self._received[pair]

    def send(self, objects: list[Any], source: int, destination: int) -> None:
        self._sent[source, destination].append(list(objects))

    def receive(self, source: int, destination: int) -> list[Any]:
        """The next objects. Raises AwaitsRank where there are none yet."""
        pair = source, destination
        number = self._received[pair]
        if number >= len(self._sent[pair]):
            raise AwaitsRank(source)
        self._received[pair] += 1
        return self._sent[pair][number]


class OneRank:
    """The surroundings of a program on one rank, and what it did there that is not in its ledger."""

    def __init__(self, rank: int, world_size: int, objects: Objects, *, local_world_size: int) -> None:
        self.rank, self.world_size, self.local_world_size = rank, world_size, local_world_size
        self.objects = objects
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.meshes: list[list[list[int]]] = []
        """The coordinates of all ranks in each mesh that was made, by rank; empty for a rank outside of it."""
        self.pipelines: list[tuple[int, ...]] = []
        """The ranks of each group that a stage of a pipeline was made with."""
        self.stage_indices: list[int] = []
        self.built: list[CollectiveCall] = []
        """Collectives of the building."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let this process act as the rank in the block."""
        self.objects.begin(self.rank)
        variables = {
            "RANK": self.rank,
            "LOCAL_RANK": self.rank % self.local_world_size,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.rank // self.local_world_size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 29500,
        }
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(torch.random.fork_rng(devices=[]))
            enter(patch.dict(os.environ, {name: str(value) for name, value in variables.items()}))
            enter(_default_device_kept())
            enter(self.mode)
            enter(fake_ranks(self.world_size, self.rank))
            for home, name, value in (
                *self._process_group(),
                *self._meshes(),
                *_cuda(self),
                *_sharding(),
            ):
                enter(patch.object(home, name, value, create=True))
            enter(transformers_not_tracing())
            enter(_OnCpu())
            yield

    @contextmanager
    def building(self) -> Iterator[None]:
        """The block builds the program: its integers have values, and its collectives are noted."""
        with _Building(self.built):
            yield

    def _process_group(self) -> Iterator[tuple[Any, str, Any]]:
        """Functions of torch.distributed that the program calls besides collectives of tensors."""
        sent = self.objects

        def of(group: Any, group_rank: int | None, rank: int | None) -> int:
            if group_rank is not None:
                members = dist.get_process_group_ranks(group)
                return members[group_rank]
            assert rank is not None
            return rank

        def send(
            objects: list, dst: Any = None, group: Any = None, device: Any = None, group_dst: Any = None, **_: Any
        ):
            sent.send(objects, self.rank, of(group, group_dst, dst))

        def receive(
            objects: list, src: Any = None, group: Any = None, device: Any = None, group_src: Any = None, **_: Any
        ) -> int:
            source = of(group, group_src, src)
            objects[:] = sent.receive(source, self.rank)
            return source

        def gather_all(objects: list, value: Any, *_: Any, **__: Any) -> None:
            objects[:] = [value] * len(objects)

        def gather(value: Any, objects: list | None = None, *_: Any, **__: Any) -> None:
            if objects is not None:
                objects[:] = [value] * len(objects)

        def scatter(output: list, objects: list | None = None, *_: Any, **__: Any) -> None:
            if objects:
                output[0] = objects[self.rank % len(objects)]

        for name, value in (
            ("send_object_list", send),
            ("recv_object_list", receive),
            ("all_gather_object", gather_all),
            ("gather_object", gather),
            ("scatter_object_list", scatter),
            *((each, _nothing) for each in ("broadcast_object_list", "barrier", "monitored_barrier")),
            *((each, _nothing) for each in ("init_process_group", "destroy_process_group")),
        ):
            yield dist, name, value
        wrapped = nn.parallel.DistributedDataParallel
        start = wrapped.__init__

        def init(ddp: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, *a: Any, **k: Any):
            start(ddp, module, None, None, *a, **k)

        yield wrapped, "__init__", init

    def _meshes(self) -> Iterator[tuple[Any, str, Any]]:
        """Meshes and stages of pipelines are noted, and are of CPUs."""
        start, stage = DeviceMesh.__init__, PipelineStage.__init__

        def init(mesh: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
            start(mesh, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)
            if kwargs.get("_root_mesh") is None:
                ranks = mesh.mesh
                places: list[list[int]] = [[] for _ in range(self.world_size)]
                with _disable_current_modes():
                    for place in torch.ones_like(ranks).nonzero().tolist():
                        places[int(ranks[tuple(place)])] = place
                self.meshes.append(places)

        def init_stage(made: Any, submodule: Any, stage_index: int, num_stages: int, device: Any, *a: Any, **k: Any):
            stage(made, submodule, stage_index, num_stages, torch.device("cpu"), *a, **k)
            self.pipelines.append(tuple(dist.get_process_group_ranks(made.group)))
            self.stage_indices.append(stage_index)

        def vote(made: Any, has_backward: bool, received_acc: Any = None) -> "_Vote":
            from torch.distributed.pipelining._utils import InferenceMode

            return _Vote(0 if InferenceMode.needs_dynamic(made._user_meta, has_backward) else 1)

        yield DeviceMesh, "__init__", init
        yield PipelineStage, "__init__", init_stage
        # All stages are taken to know as much of the shapes as this one.
        yield PipelineStage, "_warmup_forward_vote", vote
        yield PipelineStage, "_warmup_backward_result", lambda made, received_result=None: _Vote.last


class _Vote(int):
    """A vote of a pipeline's stages, in place of a tensor."""

    last: "_Vote"

    def __new__(cls, value: int) -> "_Vote":
        cls.last = super().__new__(cls, value)
        return cls.last

    def item(self) -> int:
        return int(self)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _cuda(rank: OneRank) -> Iterator[tuple[Any, str, Any]]:
    """Functions of torch.cuda that a program calls before it computes."""
    answers = {
        "current_device": rank.rank % rank.local_world_size,
        "device_count": rank.local_world_size,
        "is_bf16_supported": True,
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
        **dict.fromkeys(
            (
                *("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed"),
                *("manual_seed_all", "init"),
            )
        ),
    }
    for name, answer in answers.items():
        yield torch.cuda, name, lambda *_, _answer=answer, **__: _answer
    yield nn.Module, "_apply", _apply
    default = torch.set_default_device
    yield torch, "set_default_device", lambda device: default(None if _is_cuda(device) else device)


def _sharding() -> Iterator[tuple[Any, str, Any]]:
    """DTensor calls operators on fake tensors of its own to learn shapes; that is not part of a step."""
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return propagate(*args, **kwargs)

    yield ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen


@contextmanager
def _default_device_kept() -> Iterator[None]:
    from torch.utils import _device

    before = _device.CURRENT_DEVICE
    try:
        yield
    finally:
        if before != _device.CURRENT_DEVICE:
            torch.set_default_device(before)


@no_type_check
class _OnCpu(TorchFunctionMode):
    """Calls that name a CUDA device are made on the CPU."""

    def __torch_function__(self, func: Any, _: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": "cpu"}
        if func in _MOVES:
            args = (args[0], *("cpu" if _is_cuda(each) else each for each in args[1:]))
        elif func is Tensor.cuda or func is Tensor.pin_memory:
            return args[0]
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


_MOVES = frozenset({Tensor.to})


def _is_cuda(device: Any) -> bool:
    number = isinstance(device, int) and not isinstance(device, bool)
    return number or (isinstance(device, (str, torch.device)) and str(device).startswith("cuda"))


@no_type_check
def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Convert parameters and buffers, which torch's own function cannot do with fake ones; ties are kept."""
    copies: dict[int, nn.Parameter] = {}
    for module in self.modules() if recurse else (self,):
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in copies:
                with torch.no_grad():
                    converted = fn(parameter)
                same = converted is parameter
                copies[id(parameter)] = parameter if same else nn.Parameter(converted, parameter.requires_grad)
            module._parameters[name] = copies[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
    return self


@no_type_check
class _Building(TorchDispatchMode):
    """New integers have values, and so has what is computed from them alone; collectives are noted.

    A function that draws numbers until they are in a range is answered that they are.
    """

    def __init__(self, collectives: list[CollectiveCall]) -> None:
        super().__init__()
        self.collectives = collectives

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if func.namespace in DISTRIBUTED:
            call = collective_of(func, args, kwargs)
            if call is not None:
                self.collectives.append(call)
            return func(*args, **kwargs)
        tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        real = not any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if real and (tensors or _makes_small_integers(func, args, kwargs)):
            with _disable_current_modes():
                return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            if runs_in("torch.nn.init"):
                return False
            raise


@no_type_check
def _makes_small_integers(func: Any, args: tuple, kwargs: dict) -> bool:
    packet, dtype = func.overloadpacket, kwargs.get("dtype")
    if packet is aten.linspace:
        return True
    if dtype is None:
        numbers = args[:3] if packet is aten.arange else ()
        integers = packet is aten.randint or (numbers and all(isinstance(each, int) for each in numbers))
    else:
        integers = dtype in (torch.int32, torch.int64)
    if not integers:
        return False
    n = 1
    for each in next((each for each in args if isinstance(each, (list, tuple))), ()):
        n *= each
    return n <= MOST_BUILT


def refuse_offloaded(module: nn.Module) -> None:
    """Raise NapkinError for parameters that FSDP2 keeps in the host's memory, which a trace on CPU tensors takes for
    the device's."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

    for name, part in module.named_modules():
        if isinstance(part, FSDPModule):
            group = part._get_fsdp_state()._fsdp_param_group
            if group is not None and isinstance(group.offload_policy, CPUOffloadPolicy):
                raise NapkinError(
                    f"'{name or type(module).__name__}' has CPUOffloadPolicy: what is in the host's memory is not told "
                    "from the device's; leave `offload_policy` out"
                )
