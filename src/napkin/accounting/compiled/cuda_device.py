"""A CUDA device for Inductor to lower graphs for, on a machine that may have none, or another."""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils import _triton

from napkin.hardware.target import CudaTarget

DEVICE = torch.device("cuda", 0)


@contextmanager
def fake_cuda_device(target: CudaTarget) -> Iterator[None]:
    """Let Inductor see one CUDA device, `target`, in this context, and Triton, whether there are any or not."""
    from torch._dynamo import device_interface
    from torch._inductor import scheduler
    from torch._inductor.runtime.hints import DeviceProperties

    major, minor = target.capability
    multiprocessors, shared = _SIZES.get(target.capability, _SIZES[9, 0])
    properties = SimpleNamespace(
        name="counted for",
        major=major,
        minor=minor,
        multi_processor_count=multiprocessors,
        max_threads_per_multi_processor=2048 if major != 12 else 1536,
        regs_per_multiprocessor=65536,
        warp_size=32,
        total_memory=80 * 2**30,
        shared_memory_per_block=48 * 2**10,
        shared_memory_per_block_optin=shared,
        L2_cache_size=50 * 2**20,
        gcnArchName="",
    )
    hints = DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=multiprocessors,
        cc=major * 10 + minor,
        major=major,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=properties.max_threads_per_multi_processor,
        max_threads_per_block=1024,
        warp_size=32,
    )

    class Worker(device_interface.CudaInterface.Worker):
        current_device = staticmethod(lambda: 0)
        get_device_properties = staticmethod(lambda device=None: properties)

    class Interface(device_interface.CudaInterface):
        pass

    Interface.Worker = Worker  # pyright: ignore
    for name, value in {
        "current_device": 0,
        "device_count": 1,
        "get_device_properties": properties,
        "is_bf16_supported": True,
        "is_available": True,
        "get_compute_capability": hints.cc,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
    }.items():
        setattr(Interface, name, staticmethod(lambda *_, value=value, **__: value))
    # Its first use registers all devices.
    device_interface.get_interface_for_device("cpu")
    with ExitStack() as stack:
        stack.enter_context(patch.dict(device_interface.device_interfaces, {"cuda": Interface, "cuda:0": Interface}))
        stack.enter_context(patch.object(DeviceProperties, "create", lambda device: hints))
        stack.enter_context(patch.object(scheduler, "has_triton", lambda: True))
        stack.enter_context(patch.object(_triton, "triton_hash_with_backend", lambda: ""))
        stack.enter_context(_without_device_guards())
        stack.enter_context(_scans_without_triton())
        for name, value in {
            "get_device_properties": properties,
            "get_device_capability": target.capability,
            "current_device": 0,
            "device_count": 1,
        }.items():
            stack.enter_context(patch.object(torch.cuda, name, lambda *_, value=value, **__: value))
        _active.append(target)
        try:
            yield
        finally:
            _active.pop()


@contextmanager
def triton_target(target: CudaTarget) -> Iterator[None]:
    """Let Triton, if it is installed, translate kernels for `target` in this context, without a driver.

    torch reads in a kernel's own code which of its arguments it writes; where that fails, all count as written, and
    are copied.
    """
    if not _triton.has_triton_package():
        yield
        return
    runtime: Any = importlib.import_module("triton.runtime")
    compiler: Any = importlib.import_module("triton.backends.compiler")
    major, minor = target.capability
    made_for = compiler.GPUTarget("cuda", major * 10 + minor, 32)
    with patch.object(runtime.driver, "_active", SimpleNamespace(get_current_target=lambda: made_for)):
        yield


_active: list[CudaTarget] = []


def is_lowering_for_cuda() -> bool:
    """True while graphs are lowered for a device of `fake_cuda_device`."""
    return bool(_active)


@contextmanager
def _without_device_guards() -> Iterator[None]:
    """Some methods of a tensor ask for a guard of its device, which a CPU build of torch does not have for CUDA.

    The tensors here are fake: what a method writes does not matter, nor where its result lies in memory.
    """
    with ExitStack() as stack:
        for name, without in _WITHOUT_GUARD.items():
            original = getattr(Tensor, name)

            def call(tensor: Any, *args: Any, original: Any = original, without: Any = without, **kwargs: Any) -> Any:
                fake = isinstance(tensor, FakeTensor) and tensor.device.type == "cuda"
                return (without if fake else original)(tensor, *args, **kwargs)

            stack.enter_context(patch.object(Tensor, name, call))
        yield


@contextmanager
def _scans_without_triton() -> Iterator[None]:
    """A long cumulative sum asks Triton how wide its types are, to know the bytes of its workspace."""
    from torch._inductor.codegen.triton_split_scan import TritonSplitScanKernel

    scan = TritonSplitScanKernel.scan
    names = [f"{sign}{bits}" for sign in ("int", "uint") for bits in (8, 16, 32, 64)]
    names += ["int1", "float16", "bfloat16", "float32", "float64"]
    types = {name: SimpleNamespace(primitive_bitwidth=int(name.lstrip("abfilntou"))) for name in names}
    language: Any = ModuleType("triton.language")
    vars(language).update(types)
    triton: Any = ModuleType("triton")
    triton.language = language

    def run(*args: Any, **kwargs: Any) -> Any:
        with patch.dict(sys.modules, {"triton": triton, "triton.language": language}):
            return scan(*args, **kwargs)

    with patch.object(TritonSplitScanKernel, "scan", scan if _triton.has_triton_package() else run):
        yield


def _item_of(tensor: Tensor, index: Any) -> Any:
    index = pytree.tree_map_only(Tensor, _on_host, index)
    return pytree.tree_map_only(Tensor, _moved, _on_host(tensor)[index])


_WITHOUT_GUARD: dict[str, Any] = {
    "copy_": torch.ops.aten.copy_.default,
    "contiguous": torch.ops.aten.contiguous.default,
    "__invert__": torch.ops.aten.bitwise_not.default,
    "__getitem__": _item_of,
    "__setitem__": lambda tensor, *_: None,
    "index_put_": lambda tensor, *_, **__: tensor,
}

# Multiprocessors, and bytes of shared memory that a block can ask for, by compute capability.
_SIZES = {
    (7, 0): (80, 98304),
    (7, 5): (40, 65536),
    (8, 0): (108, 166912),
    (8, 6): (84, 101376),
    (8, 9): (142, 101376),
    (9, 0): (132, 232448),
    (10, 0): (148, 232448),
    (12, 0): (170, 101376),
}


def moved_to_cuda(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Put all that a graph on the CPU makes on the CUDA device, in place; its inputs there.

    Inductor itself then works out where every value in it is.
    """
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.args = pytree.tree_map_only(torch.device, _on_cuda, node.args)
                node.kwargs = pytree.tree_map_only(torch.device, _on_cuda, node.kwargs)
                if module is not graph:
                    node.meta["val"] = pytree.tree_map_only(FakeTensor, _moved, node.meta.get("val"))
            module.recompile()
    fakes = {id(each): each for each in example_inputs if isinstance(each, Tensor)}
    moved = {number: _moved(each) for number, each in fakes.items()}
    for node in graph.graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor):
            node.meta["val"] = _moved(node.meta["val"])
    return [moved.get(id(each), each) for each in example_inputs]


def put_on_cpu(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Let a graph that torch.compile has traced, before autograd, make on the CPU what it would make on a CUDA device;
    in place."""
    for module in graph.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if node.op == "call_method" and node.target == "cuda":
                node.target, node.args, node.kwargs = "to", (node.args[0], "cuda"), {}
            if node.op in ("call_method", "call_function"):
                node.args = pytree.tree_map_only((torch.device, str), _on_cpu, node.args)
                node.kwargs = pytree.tree_map_only((torch.device, str), _on_cpu, node.kwargs)
                if isinstance(node.kwargs.get("device"), int):
                    node.kwargs = {**node.kwargs, "device": "cpu"}
        module.recompile()
    return graph


def _on_cpu(device: Any) -> Any:
    if str(device).partition(":")[0] != "cuda":
        return device
    return "cpu" if isinstance(device, str) else torch.device("cpu")


def _on_cuda(device: torch.device) -> torch.device:
    return DEVICE if device.type in ("cpu", "cuda") else device


def _moved(tensor: Tensor, device: torch.device = DEVICE) -> Tensor:
    mode = getattr(tensor, "fake_mode", None)
    assert mode is not None
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _on_host(tensor: Tensor) -> Tensor:
    return _moved(tensor, torch.device("cpu"))
