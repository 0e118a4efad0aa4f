"""Writes and runs the program of one of Inductor's graphs: buffers allocated, kernels called, buffers freed."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any, no_type_check
from unittest.mock import patch

import torch
from torch import Tensor
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen import common
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen, SubgraphPythonWrapperCodegen
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import UserDefinedTritonKernel
from torch._inductor.virtualized import V

from napkin.accounting.compiled.listening import Kernel, Origin, listener
from napkin.accounting.ledger import Phase
from napkin.accounting.operators import elementwise_flops_of


@contextmanager
def writing_programs(settings: dict[str, Any]) -> Iterator[None]:
    """Let Inductor write programs of this kind; `settings` are those of the graph that it lowers."""
    common.init_backend_registration()
    ours = {
        device: common.DeviceCodegen(common.device_codegens[device].scheduling, _Writer) for device in ("cpu", "cuda")
    }
    phase = None if settings.get("is_inference") else "backward" if settings.get("is_backward") else "forward"
    graph = settings.get("graph_id")
    with (
        patch.dict(common.device_codegens, ours),
        patch.object(TritonScheduling, "codegen_comment", _note_nodes),
        patch.object(CppScheduling, "codegen_comment", _note_nodes),
        # A template is loaded from where autotuning would time it against others.
        patch.object(PyCodeCache, "load", lambda *_, **__: SimpleNamespace(__file__="", key="")),
        patch.object(_Writer, "phase", phase),
        patch.object(_Writer, "graph", -1 if graph is None else graph),
    ):
        yield


def _note_nodes(scheduling: Any, node_schedule: Sequence[Any], kernel_name: str | None = None) -> None:
    writer: Any = V.graph.wrapper_code
    writer.nodes = [node for node in node_schedule if hasattr(node, "get_read_buffer_sizes")]


# What writes programs is a mixin of two classes of torch's, whose types differ from each other.
_Any: Any = object
_Torch: Any = PythonWrapperCodegen
_TorchSubgraph: Any = SubgraphPythonWrapperCodegen


@no_type_check
class _Writing(_Any):
    """The parts of Inductor's writer of programs that differ."""

    phase: Any = None
    graph: Any = -1
    nodes: Sequence[Any] = ()
    """Nodes of the kernel whose call is written next."""

    def write_header(self) -> None:
        """Write nothing: `make_program` gives the program its names."""

    def write_triton_header_once(self) -> None:
        """Nothing, as all headers."""

    def write_get_raw_stream_header(self) -> None:
        """Nothing, as all headers."""

    def write_get_raw_stream_header_once(self) -> None:
        """Nothing, as all headers."""

    def write_async_compile_wait(self) -> None:
        """Nothing is compiled."""

    def add_benchmark_harness(self, output) -> None:
        """Nothing is timed."""

    def write_get_raw_stream(self, *_) -> str:
        return "0"

    def codegen_device_guard_enter(self, device_idx, *_, **__) -> None:
        self.last_seen_device_guard_index = device_idx

    def codegen_device_guard_exit(self) -> None:
        """There is one device."""

    def _define_kernel_helper(self, *_, **__) -> None:
        """A kernel is only called."""

    def enter_context(self, ctx) -> None:
        super().enter_context(ctx)
        self.writeline(f"come_from({self.place(_origin(ctx, self.phase, self.graph))})")

    def generate_kernel_call(self, kernel_name, call_args, **_) -> None:
        nodes, self.nodes = self.nodes, ()
        kernel = _describe(kernel_name, nodes or [V.graph.scheduler.current_node], self.phase, self.graph)
        arguments = [str(each) for each in call_args if isinstance(each, str)]
        self.writeline(f"run_kernel({self.place(kernel)}, {', '.join(arguments)})")

    def place(self, thing) -> int:
        """The number of an origin or a kernel among those of the program."""
        things = self.get_things()
        things.append(thing)
        return len(things) - 1


@no_type_check
class _Writer(_Writing, _Torch):
    def __init__(self) -> None:
        self.things: list[Any] = []
        super().__init__()

    def get_things(self):
        return self.things

    @staticmethod
    def create(is_subgraph, subgraph_name, parent_wrapper, partition_signatures=None):
        if is_subgraph:
            return _SubgraphWriter(subgraph_name, parent_wrapper, partition_signatures)
        return _Writer()


@no_type_check
class _SubgraphWriter(_Writing, _TorchSubgraph):
    @property
    def phase(self):
        return self.get_root_graph().phase

    @property
    def graph(self):
        return self.get_root_graph().graph

    def get_things(self):
        return self.get_root_graph().things


def make_program(graph: GraphLowering) -> Any:
    """Stands in for `GraphLowering.compile_to_module`: an object whose `call` runs the program."""
    text, _ = graph.codegen()
    writer: Any = graph.wrapper_code
    names = {**_names(), **graph.constants, "things": writer.things}
    exec(text.value, names)
    return _Program(names)


class _Program:
    def __init__(self, names: dict[str, Any]) -> None:
        things, run = names["things"], names["call"]
        names["come_from"] = lambda number: listener().come_from(things[number])
        names["run_kernel"] = lambda number, *given: listener().run_kernel(
            things[number], [each for each in given if isinstance(each, Tensor)]
        )
        self._run = run
        self.source = ""

    def call(self, arguments: list[Any]) -> Any:
        try:
            return self._run(arguments)
        finally:
            listener().come_from(None)


def _names() -> dict[str, Any]:
    """What Inductor's programs import."""
    from torch._inductor.select_algorithm import extern_kernels

    def allocate(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, **_: Any) -> Tensor:
        return listener().allocate(shape, stride, dtype)

    def reinterpret(tensor: Tensor, shape: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
        return listener().reinterpret(tensor, shape, stride, offset)

    def nothing(*_: Any, **__: Any) -> None:
        pass

    return {
        "torch": torch,
        "math": math,
        "inf": math.inf,
        "nan": math.nan,
        "device": lambda *_, **__: torch.device("cpu"),
        "aten": torch.ops.aten,
        "inductor_ops": torch.ops.inductor,
        "_quantized": torch.ops._quantized,
        "extern_kernels": extern_kernels,
        "empty_strided": allocate,
        "empty_strided_cpu": allocate,
        "empty_strided_cpu_pinned": allocate,
        "empty_strided_cuda": allocate,
        "reinterpret_tensor": reinterpret,
        "alloc_from_pool": torch.ops.inductor._alloc_from_pool,
        "assert_size_stride": nothing,
        "assert_alignment": nothing,
        "maybe_profile": lambda *_: nullcontext(),
        "run_intermediate_hooks": nothing,
    }


def _describe(name: str, nodes: Sequence[Any], phase: Phase | None, graph: int) -> Kernel:
    sources = list(dict.fromkeys(each for node in nodes for each in _sources(node)))
    last = sources[-1] if sources else None
    return Kernel(
        re.sub(r"_\d+$", "", name),
        _origin(last, phase, graph),
        bytes_read=sum(int(node.get_read_buffer_sizes()) for node in nodes),
        bytes_written=sum(int(node.get_write_buffer_sizes()) for node in nodes),
        elementwise_flops=sum(map(_elementwise_flops, sources)),
        opaque=any(isinstance(node.node, UserDefinedTritonKernel) for node in nodes),
        **(_attention_work(sources) if "_tem_" in name else {}),
    )


def _attention_work(sources: Sequence[torch.fx.Node]) -> dict[str, Any]:
    """FLOPs of FlexAttention's templates over all query-key pairs: what its mask leaves out, only a run knows."""
    for node in sources:
        if node.target not in _FLEX_ATTENTION:
            continue
        query, key, value = (each.meta["val"] for each in node.args[:3])  # pyright: ignore
        batch, m, n, k = query.shape[0] * query.shape[1], query.shape[2], key.shape[2], query.shape[3]
        scores, mixed = 2 * batch * m * n * k, 2 * batch * m * n * value.shape[3]
        if node.target is torch.ops.higher_order.flex_attention:
            return {"flops": scores + mixed, "contraction": (batch, m, n, k)}
        return {"flops": 2 * (scores + mixed), "recomputed_flops": scores, "contraction": (batch, m, n, k)}
    return {}


_FLEX_ATTENTION = (torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward)


def _sources(node: Any) -> list[torch.fx.Node]:
    """Operators of the graph that a scheduler's node computes, in the order of the graph."""
    sources = {each for part in node.get_nodes() if part.node is not None for each in part.node.get_origins()}
    graph: Any = V.graph.graph
    order = {each: number for number, each in enumerate(graph.nodes)}
    return sorted(sources, key=lambda each: order.get(each, -1))


def _elementwise_flops(node: torch.fx.Node) -> int:
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0
    values = [each.meta.get("val") for each in (*node.all_input_nodes, node)]
    tensors = [each for value in values for each in (value if isinstance(value, (list, tuple)) else [value])]
    flops: Any = elementwise_flops_of(node.target, (), [each for each in tensors if isinstance(each, Tensor)])
    # Where sizes are symbols, those of the first call stand for all.
    return int(flops.node.hint or 0) if isinstance(flops, torch.SymInt) else flops


def _origin(node: torch.fx.Node | None, phase: Phase | None, graph: int) -> Origin:
    if node is None:
        return Origin("", phase, (graph, -1))
    if phase == "backward" and "is_backward" not in str(node.meta.get("partitioner_tag", "is_backward")):
        phase = "recompute"
    modules = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = str(list(modules.values())[-1][0]) if modules else ""
    return Origin(_from_compiled(path), phase, (graph, node.meta.get("seq_nr", -1)))


@cache
def _from_compiled(path: str) -> str:
    """A module's path, from the one that was compiled on; dynamo begins with what it compiles: `L['self'].blocks`."""
    names = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", re.sub(r"^[A-Z]\[['\"]\w+['\"]\]\.?", "", path))
    return ".".join(name for name in names.split(".") if name not in ("", "_modules", "_orig_mod"))
