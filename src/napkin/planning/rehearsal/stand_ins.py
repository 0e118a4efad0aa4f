"""The stand-ins that a script finds in place of a GPU: torch.cuda, the process group, compiling and fused attention.

They are made for the child process of a rehearsal, which ends with it: nothing is put back.
"""

import contextlib
import importlib
import subprocess
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, no_type_check
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from napkin.distributed.fake_ranks import fake_ranks
from napkin.hardware.cluster import Cluster
from napkin.hardware.target import CudaTarget
from napkin.planning.rehearsal.compiling import Tracing, is_cuda
from napkin.planning.rehearsal.flat_parameters import stand_in_for_flat_parameters
from napkin.planning.rehearsal.recorder import ScriptRecorder, is_on_host
from napkin.planning.rehearsal.stand_in_modules import stand_in_modules
from napkin.planning.step.machine import target_of

CUDA = torch.device("cuda", 0)


@no_type_check
class DeviceMode(TorchFunctionMode):
    """Calls that name a CUDA device are made on the CPU, and the recorder is told where their results are."""

    def __init__(self, recorder: ScriptRecorder, default: bool | None = None) -> None:
        super().__init__()
        self.recorder, self.default = recorder, default

    def __torch_function__(self, func: Any, _: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(func, torch._ops.OpOverload) and not is_cuda(kwargs.get("device", "cpu")):
            return func(*args, **kwargs)
        if func in _PROPERTIES:
            return func(*args) if is_on_host(args[0]) else _PROPERTIES[func]
        if func in _MOVES and isinstance(args[0], Tensor):
            return self._move(func, args[0], args[1:], kwargs)
        if func is Tensor.backward:
            self.recorder.begin_step()
            result = func(*args, **kwargs)
            self.recorder.after_backward()
            return result
        if func is Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
            return _deep_copied(args[0], args[1])
        if func in _TO_PYTHON and isinstance(args[0], FakeTensor):
            return _to_python(func, args[0])
        if func is Tensor.__format__ and isinstance(args[0], FakeTensor) and args[0].numel() == 1:
            return format(args[0].item(), *args[1:])
        if func is Tensor.pin_memory:
            return args[0]
        device = kwargs.get("device")
        if func in _OF_VALUES and (is_cuda(device) or (device is None and self.default)):
            wanted = kwargs.pop("requires_grad", False)
            kwargs.pop("device", None)
            made = func(*args, **kwargs)
            moved = self._move(Tensor.to, made, (CUDA,), {})
            return moved.requires_grad_() if wanted else moved
        kwargs.pop("pin_memory", None)
        place = self.recorder.place if "device" not in kwargs else None
        if kwargs.get("device") is not None:
            # torch's own sharding is told that its mesh is of CPUs, and so are the buffers that it makes.
            place = is_cuda(kwargs["device"]) or _caller().startswith(_SHARDING)
            kwargs["device"] = "cpu" if place or _is_cpu(kwargs["device"]) else kwargs["device"]
        elif place is None and self.default and not any(isinstance(value, Tensor) for value in args):
            place = True
        elif place is None and isinstance(func, types.FunctionType):
            # A function of torch in Python makes what it needs where its tensors are.
            place = True if any(isinstance(value, FakeTensor) and not is_on_host(value) for value in args) else None
        generator = kwargs.get("generator")
        if isinstance(generator, torch.Generator) and place:
            kwargs.pop("generator")
        before, self.recorder.place = self.recorder.place, place
        try:
            return func(*args, **kwargs)
        finally:
            self.recorder.place = before

    def _move(self, func: Any, tensor: Tensor, args: tuple, kwargs: dict) -> Any:
        device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
        other = kwargs.pop("other", None)
        flags = [value for value in args if isinstance(value, bool)]
        for value in (*args, other):
            if isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, Tensor):
                dtype, device = value.dtype, "cpu" if is_on_host(value) else "cuda"
            elif isinstance(value, (str, torch.device)) or (isinstance(value, int) and not isinstance(value, bool)):
                device = value
        if func is Tensor.cuda:
            device = "cuda"
        elif func is Tensor.cpu:
            device = "cpu"
        if device is not None and not is_cuda(device) and not _is_cpu(device):
            return tensor.to(device, dtype=dtype)
        host = is_on_host(tensor)
        to_host = host if device is None else not is_cuda(device)
        copy = kwargs.get("copy", False) or (len(flags) > 1 and flags[1])
        kwargs = {"memory_format": kwargs["memory_format"]} if kwargs.get("memory_format") is not None else {}
        if host == to_host:
            return Tensor.to(tensor, dtype or tensor.dtype, copy=copy, **kwargs)
        before, self.recorder.place = self.recorder.place, not to_host
        try:
            return torch.ops.aten._to_copy.default(tensor, dtype=dtype, **kwargs)
        finally:
            self.recorder.place = before


_PROPERTIES = {getattr(Tensor, name).__get__: answer for name, answer in (("is_cuda", True), ("is_cpu", False))}
_MOVES = frozenset({Tensor.to, Tensor.cuda, Tensor.cpu})
_TO_PYTHON = frozenset({Tensor.numpy, Tensor.tolist, Tensor.__array__})
_OF_VALUES = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
_BETWEEN = ("torch._compile", "torch._dynamo.eval_frame", "torch.overrides", "torch.utils._device", __name__)

_SHARDING = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed._composable")


def _caller() -> str:
    """The module that called a function of torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "")


_TOLD_THE_TRUTH = (
    "torch._", "torch.distributed", "torch.utils._", "torch.library", "torch.nn.functional", "torch.fx", "napkin.",
)  # fmt: skip
"""Modules that see a tensor of the device where it really is, on the CPU: torch's own dispatch, sharding,
accounting."""


def _device_of(device: Callable[[FakeTensor], torch.device]) -> property:
    """Return the device that a fake tensor names: the GPU, unless the script has it on the host."""

    def read(tensor: FakeTensor) -> torch.device:
        actual = device(tensor)
        if actual.type != "cpu" or sys._getframe(1).f_globals.get("__name__", "").startswith(_TOLD_THE_TRUTH):
            return actual
        return actual if is_on_host(tensor) else CUDA

    return property(read)


def _deep_copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """A copy of a fake tensor, whose storage has no numbers to copy."""
    if id(tensor) not in memo:
        with torch.no_grad():
            copied: Tensor = tensor.detach().clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = copied = nn.Parameter(copied, False) if is_parameter else copied
        copied.requires_grad_(tensor.requires_grad)
        if tensor.grad is not None:
            copied.grad = _deep_copied(tensor.grad, memo)
    return memo[id(tensor)]


def _to_python(func: Any, tensor: Tensor) -> Any:
    with _disable_current_modes():
        wide = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
        numbers = torch.zeros(tuple(tensor.shape), dtype=wide)
        return numbers.tolist() if func is Tensor.tolist else numbers.numpy()


def _is_cpu(device: Any) -> bool:
    return str(device).startswith("cpu")


class StandIns:
    """Puts the stand-ins in place; `notes` says what they assume, a sentence for each that was used."""

    def __init__(self, cluster: Cluster, folder: str) -> None:
        self.cluster, self.folder = cluster, folder
        self.notes: dict[str, None] = {}
        self.ranks = ExitStack()
        self.mode: DeviceMode | None = None
        self.tracing = Tracing(self.note)

    def install(self) -> None:
        """Replace what would need a GPU, other ranks, a compiler or a terminal's tools."""
        # Its tables name torch's own functions: they are filled before those are replaced.
        importlib.import_module("torch._dynamo.variables.torch")
        rules: Any = importlib.import_module("torch._dynamo.trace_rules")
        rules.get_torch_obj_rule_map()
        rules.clear_lru_cache = _nothing
        self._cuda()
        self._process_group()
        self._processes()
        self._compiler()
        stand_in_modules(self.note, self.folder)
        self._attention()
        self._data_loader()
        run, check = subprocess.run, subprocess.check_output
        quiet = lambda command: "nvidia-smi" in str(command)  # noqa: E731
        done = types.SimpleNamespace(stdout="", stderr="", returncode=0, check_returncode=lambda: None)
        subprocess.run = lambda command, *a, **k: done if quiet(command) else run(command, *a, **k)
        subprocess.check_output = lambda command, *a, **k: b"" if quiet(command) else check(command, *a, **k)

    def note(self, sentence: str) -> None:
        self.notes[sentence] = None

    @no_type_check
    def _cuda(self) -> None:
        device, n_local = self.cluster.device, min(self.cluster.n_devices, self.cluster.node.devices)
        target = target_of(device)
        capability = target.capability if isinstance(target, CudaTarget) else (9, 0)
        properties = types.SimpleNamespace(
            name=device.name, total_memory=int(device.memory_bytes), major=capability[0], minor=capability[1],
            multi_processor_count=132, warp_size=32, max_threads_per_multi_processor=2048,
            regs_per_multiprocessor=65536, shared_memory_per_block_optin=232448, L2_cache_size=50 * 2**20,
            uuid="0", is_integrated=0,
        )  # fmt: skip
        answers = {
            "is_available": True, "device_count": n_local, "current_device": 0, "is_initialized": True,
            "is_bf16_supported": True, "get_device_name": device.name, "get_device_capability": capability,
            "get_device_properties": properties, "mem_get_info": (int(device.memory_bytes),) * 2,
            "memory_stats": defaultdict(int), "memory_summary": "", "memory_snapshot": [],
            "get_arch_list": [f"sm_{capability[0]}0"],
            "utilization": 0, "temperature": 0, "power_draw": 0, "can_device_access_peer": True,
            "is_tf32_supported": True,
            "list_gpu_processes": "", "get_allocator_backend": "native", "is_current_stream_capturing": False,
        }  # fmt: skip
        for name in (
            "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached",
            "max_memory_cached",
        ):  # fmt: skip
            answers[name] = 0
        for name in (
            "set_device", "synchronize", "manual_seed", "manual_seed_all", "seed", "seed_all", "empty_cache", "init",
            "reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached", "ipc_collect",
            "reset_accumulated_memory_stats", "set_per_process_memory_fraction", "set_rng_state", "set_rng_state_all",
            "set_stream", "set_sync_debug_mode", "_lazy_init",
        ):  # fmt: skip
            answers[name] = None
        for name, answer in answers.items():
            setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
        torch.cuda.initial_seed = lambda: 0
        torch.cuda.get_rng_state = lambda *_, **__: torch.random.get_rng_state()
        torch.cuda.get_rng_state_all = lambda: [torch.random.get_rng_state()] * n_local
        torch.cuda.Stream, torch.cuda.Event = _Stream, _Event
        torch.cuda.current_stream = torch.cuda.default_stream = lambda *_, **__: _Stream()
        torch.cuda.stream = lambda *_, **__: contextlib.nullcontext()
        torch.cuda.device = _Device
        torch.cuda.CUDAGraph = torch.cuda.graph = _Stream
        torch.cuda.make_graphed_callables = lambda callables, *_, **__: callables
        torch.cuda.cudart = _Stream
        torch.cuda.profiler = types.SimpleNamespace(start=_nothing, stop=_nothing, profile=contextlib.nullcontext)
        torch.cuda.nvtx = types.SimpleNamespace(
            range_push=_nothing, range_pop=_nothing, mark=_nothing, range=lambda *_, **__: contextlib.nullcontext()
        )
        torch.cuda.memory._record_memory_history = torch.cuda.memory._dump_snapshot = _nothing
        torch.Generator = _Generator
        if hasattr(torch, "accelerator"):
            torch.accelerator.is_available = lambda: True
            torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
            torch.accelerator.current_stream = lambda *_: _Stream()
            torch.accelerator.device_count = lambda: n_local
            torch.accelerator.set_device_index = torch.accelerator.synchronize = _nothing
            torch.accelerator.current_device_index = lambda: 0
        enabled, kind = torch.is_autocast_enabled, torch.get_autocast_dtype
        torch.is_autocast_enabled = lambda device="cpu": enabled("cpu" if device == "cuda" else device)
        torch.get_autocast_dtype = lambda device: kind("cpu") if device == "cuda" and enabled("cpu") else kind(device)
        torch.backends.cuda.is_built = lambda: True
        torch.version.cuda = torch.version.cuda or "12.8"
        torch.backends.cudnn.is_available = lambda: True
        torch.backends.cudnn.version = lambda: 91002
        torch.set_default_device = self._set_default
        FakeTensor.device = _device_of(FakeTensor.device.fget)
        nn.Module._apply = _apply
        nn.Module.cuda = lambda module, device=None: module._apply(lambda tensor: tensor.cuda())
        nn.Module.to = _module_to(nn.Module.to)
        register = nn.Module.register_parameter
        nn.Module.register_parameter = lambda module, name, param: register(module, name, self._fake_parameter(param))
        setattr_ = nn.Module.__setattr__

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            setattr_(module, name, self._fake_parameter(value) if isinstance(value, nn.Parameter) else value)

        nn.Module.__setattr__ = set_attribute
        torch.save = lambda *_, **__: self.note("what the script saves is not written")

    def _set_default(self, device: Any) -> None:
        if self.mode is not None:
            self.mode.default = is_cuda(device) if device is not None else None

    @no_type_check
    def _fake_parameter(self, parameter: Any) -> Any:
        """A parameter is fake from birth, so that moving it to the device leaves it the same object."""
        if self.mode is None or not isinstance(parameter, nn.Parameter) or isinstance(parameter, (FakeTensor, DTensor)):
            return parameter
        fake = nn.Parameter(self.mode.recorder.as_fake(parameter.detach()), parameter.requires_grad)
        return fake

    @no_type_check
    def _process_group(self) -> None:
        world_size = self.cluster.n_devices
        is_there, really_init = dist.is_initialized, dist.init_process_group

        def init(*_: Any, **__: Any) -> None:
            if not is_there():
                with patch.object(dist, "init_process_group", really_init):
                    self.ranks.enter_context(fake_ranks(world_size))
                self.note("the other ranks are taken to do what rank 0 does")

        def gather_objects(objects: list, value: Any, *_: Any, **__: Any) -> None:
            objects[:] = [value] * len(objects)

        dist.init_process_group = init
        dist.destroy_process_group = _nothing
        dist.barrier = dist.monitored_barrier = dist.broadcast_object_list = _nothing
        dist.get_backend = lambda *_, **__: "nccl"
        dist.is_nccl_available = lambda: True
        dist.all_gather_object = gather_objects
        dist.distributed_c10d.init_process_group = init
        mesh = dist.init_device_mesh
        dist.init_device_mesh = dist.device_mesh.init_device_mesh = lambda device, *a, **k: (
            init(),
            dist.device_mesh._real_init_device_mesh("cpu" if device == "cuda" else device, *a, **k),
        )[1]
        dist.device_mesh._real_init_device_mesh = mesh
        wrapped = nn.parallel.DistributedDataParallel
        start = wrapped.__init__

        def wrap(
            ddp: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, *a: Any, **k: Any
        ) -> None:
            with self._on_device():
                start(ddp, module, None, None, *a, **k)

        wrapped.__init__ = wrap
        prepare = wrapped._pre_forward

        def pre_forward(ddp: Any, *inputs: Any, **named: Any) -> Any:
            # C++ code makes the buckets anew here.
            with self._on_device():
                return prepare(ddp, *inputs, **named)

        wrapped._pre_forward = pre_forward

    def _processes(self) -> None:
        """A script that starts a process for each GPU goes on as the first of them, and `DataParallel` on one GPU."""
        processes: Any = torch.multiprocessing

        def spawn(function: Any, args: tuple = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
            self.note(f"of the {nprocs} processes that the script starts, the first is rehearsed")
            function(0, *args)

        def start(function: Any, args: tuple = (), nprocs: int = 1, *a: Any, **k: Any) -> None:
            spawn(function, args, nprocs)

        processes.spawn, processes.start_processes = spawn, start
        processes.set_start_method = _nothing
        parallel: Any = nn.DataParallel

        def keep(wrapper: Any, module: nn.Module, *_: Any, **__: Any) -> None:
            nn.Module.__init__(wrapper)
            wrapper.module, wrapper.device_ids = module, [0]

        parallel.__init__ = keep
        parallel.forward = lambda wrapper, *inputs, **named: wrapper.module(*inputs, **named)
        stand_in_for_flat_parameters(self.note)

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """Tensors made in the block without a device are on the GPU."""
        if self.mode is None:
            yield
            return
        recorder = self.mode.recorder
        before, recorder.place = recorder.place, True
        try:
            yield
        finally:
            recorder.place = before

    @no_type_check
    def _compiler(self) -> None:
        self.tracing.install(DeviceMode)
        torch.jit.script = lambda function, *_, **__: function

    @no_type_check
    def _attention(self) -> None:
        from torch.nn.attention import flex_attention as flex

        compiled = flex.flex_attention

        def attend(query, key, value, *args, **kwargs):
            if torch.compiler.is_compiling():
                return compiled(query, key, value, *args, **kwargs)
            scale = kwargs.get("scale", args[2] if len(args) > 2 else None)
            gqa = query.shape[1] != key.shape[1]
            self.note("FlexAttention outside of torch.compile is counted as causal, whatever its mask hides")
            return functional.scaled_dot_product_attention(
                query, key, value, is_causal=query.shape[-2] == key.shape[-2], scale=scale, enable_gqa=gqa
            )

        flex.flex_attention = attend

    @no_type_check
    def _data_loader(self) -> None:
        loader = torch.utils.data.DataLoader
        start = loader.__init__

        def init(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
            for name in ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "timeout",
                         "multiprocessing_context", "pin_memory_device"):  # fmt: skip
                kwargs.pop(name, None)
            start(self, dataset, *args[:4], **kwargs)

        loader.__init__ = init


class _Stream:
    """A stream without ordering."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0
        self.device = CUDA

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _nothing

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None: ...


class _Event(_Stream):
    """An event that has happened."""

    def elapsed_time(self, _: Any) -> float:
        return 1.0


class _Device(contextlib.nullcontext):
    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.idx = 0


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> "_Generator":
        return super().__new__(cls, "cpu")  # pyright: ignore[reportCallIssue]


def _nothing(*_: Any, **__: Any) -> None:
    return None


@no_type_check
def _module_to(to: Any) -> Any:
    """`Module.to`, for a device that this build of torch lacks."""

    def move(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device = kwargs.get("device", next((each for each in args if isinstance(each, (str, torch.device, int))), None))
        dtype = kwargs.get("dtype", next((each for each in args if isinstance(each, torch.dtype)), None))
        for value in args:
            if isinstance(value, Tensor):
                device, dtype = value.device, value.dtype

        def convert(tensor: Tensor) -> Tensor:
            wanted = dtype if dtype is not None and (tensor.is_floating_point() or tensor.is_complex()) else None
            return tensor.to(device=device, dtype=wanted)

        if str(device) == "meta":
            return to(module, *args, **kwargs)
        return module._apply(convert)

    return move


@no_type_check
def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Convert parameters and buffers. A parameter stays the same object, as optimizers and ties refer to it."""
    if recurse:
        for child in self.children():
            child._apply(fn)
    for name, parameter in self._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            converted = fn(parameter)
        if converted is not parameter:
            try:
                parameter.data = converted
            except (RuntimeError, TypeError):
                self._parameters[name] = nn.Parameter(converted, parameter.requires_grad)
        if parameter.grad is not None:
            with torch.no_grad():
                parameter.grad = fn(parameter.grad)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self
