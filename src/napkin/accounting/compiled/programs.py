"""Programs of torch.compile, run on fake tensors: everything that Inductor decides, without a kernel being built.

While a step is counted, what `torch.compile` compiles goes through dynamo, AOTAutograd, the partitioner and Inductor as
usual: graph breaks, recomputation, fusion, order of kernels, reuse and donation of buffers are torch's own decisions.
Only code generation ends early: of each graph there is a Python program that allocates buffers, calls kernels and frees
buffers (`napkin.accounting.compiled.wrapper`), and that program runs, its kernels replaced by a note of what they are
(`napkin.accounting.compiled.listening`).
Operators that Inductor does not generate, such as products and attention, are called as they are, and recorded as any.

For a CUDA device, graphs are lowered as for that device, though traced on the CPU: their tensors are put on a fake CUDA
device once autograd has done its part. A program itself runs on fake CPU tensors.
"""

import copy
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from napkin.accounting.compiled.cuda_device import fake_cuda_device, moved_to_cuda, put_on_cpu, triton_target
from napkin.hardware.target import CudaTarget


@contextmanager
def compiling_without_kernels(
    cuda: CudaTarget | None, running: FakeTensorMode, failed: Callable[[Exception], None] | None = None
) -> Iterator[None]:
    """Let `torch.compile` make programs for `cuda`, or else for this CPU, that run on fake tensors of `running`.

    A graph that Inductor cannot lower runs operator by operator if `failed` is given, which is called with the error.
    """
    wrapper = torch._TorchCompileInductorWrapper

    def compile_graph(self: Any, model: Any, inputs: Any, *, config_patches: dict[str, Any] | None = None) -> Any:
        from torch._functorch import config as differentiating
        from torch._inductor import compile_fx
        from torch._inductor import config as generating

        if cuda is not None:
            model = put_on_cpu(model)
        settings = {**self.config, **(config_patches or {}), **_WITHOUT_MEASURING}
        lower = functools.partial(_lower_or_run, failed, cuda=cuda, settings=settings)
        # The backward pass may be compiled later, outside of what is patched here.
        with (
            _disable_current_modes(),
            differentiating.patch(enable_autograd_cache=False),
            generating.patch(settings),
        ):
            return compile_fx.compile_fx(model, [_example(each, running) for each in inputs], inner_compile=lower)

    of_tensor = FakeTensorMode.from_tensor

    def from_tensor(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
        # dynamo's copies of views would be made by the mode that is active here, and not by its own.
        with _disable_current_modes():
            return of_tensor(mode, *args, **kwargs)

    with (
        warnings.catch_warnings(),
        patch.object(wrapper, "__call__", compile_graph),
        patch.object(FakeTensorMode, "from_tensor", from_tensor),
        _own_compiled_code(),
        _flex_attention_trains(cuda),
        triton_target(cuda) if cuda is not None else nullcontext(),
    ):
        # The recorder's own hooks are global, and know modules that torch.compile has wrapped.
        warnings.filterwarnings("ignore", message="Using `torch.compile")
        yield


@contextmanager
def _flex_attention_trains(cuda: CudaTarget | None) -> Iterator[None]:
    """FlexAttention refuses to train on a CPU, where a step for a GPU is traced."""
    if cuda is None:
        yield
        return
    from torch.nn.attention import flex_attention

    with patch.object(flex_attention, "_validate_device", lambda *_: None):
        yield


def _example(value: Any, running: FakeTensorMode) -> Any:
    """An input as a graph may keep it.

    Parts of a graph that DistributedDataParallel's buckets divide are compiled as they run. A fake tensor of the step
    would stay alive with such a part.
    """
    if TracingContext.try_get() is not None or type(value) is not FakeTensor or value.fake_mode is not running:
        return value
    with _disable_current_modes(), running:
        copied = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return copied.requires_grad_(value.requires_grad)


# Steps in which Inductor would measure, cache or build. CUDA graphs keep buffers in a pool of their own, which is not
# counted.
_WITHOUT_MEASURING: dict[str, Any] = {
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "triton.cudagraphs": False,
    "cpp_wrapper": False,
    "fx_wrapper": False,
    "benchmark_kernel": False,
    "benchmark_fusion": False,
    "max_autotune": False,
    "max_autotune_pointwise": False,
    "max_autotune_gemm": False,
    "coordinate_descent_tuning": False,
    "triton.multi_kernel": 0,
    "triton.autotune_at_compile_time": False,
    "compile_threads": 1,
}


@contextmanager
def _own_compiled_code() -> Iterator[None]:
    """Forget afterwards what was compiled here: a program for fake tensors must serve neither real ones nor others."""
    before, counted = set(_compiled_entries()), copy.deepcopy(_dynamo_counters())
    try:
        yield
    finally:
        counters = _dynamo_counters()
        counters.clear()
        counters.update(counted)
        for number, entry in _compiled_entries().items():
            guards = entry.guard_manager
            if number not in before and guards.extra_state is not None:
                from torch._dynamo.guards import DeletedGuardManagerWrapper

                guards.extra_state.invalidate(entry, DeletedGuardManagerWrapper("it was compiled for fake tensors"))


def _compiled_entries() -> dict[int, Any]:
    """What dynamo has compiled, by number; empty where dynamo is not loaded, since loading it takes a second."""
    if "torch._dynamo.convert_frame" not in sys.modules:
        return {}
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    codes = [code for reference in input_codes.seen if (code := reference()) is not None]
    return {id(entry): entry for code in codes for entry in _debug_get_cache_entry_list(code)}


def _dynamo_counters() -> dict[str, Any]:
    utils = sys.modules.get("torch._dynamo.utils")
    return {} if utils is None else utils.counters


def _lower_or_run(
    failed: Callable[[Exception], None] | None, graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **given: Any
) -> Any:
    from torch._inductor import compile_fx

    if failed is None:
        return _lower(graph, example_inputs, **given)
    plain = copy.deepcopy(graph)
    try:
        return _lower(graph, example_inputs, **given)
    except Exception as error:
        failed(error)
        inductor: Any = compile_fx
        return inductor.make_boxed_func(plain.forward)


def _lower(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    cuda: CudaTarget | None,
    settings: dict[str, Any],
    compile_region_name: str | None = None,
    **keywords: Any,
) -> Any:
    """Stands in for Inductor's own compilation of one graph: the same, up to the program."""
    from torch._dynamo.utils import count_calls
    from torch._inductor import compile_fx, cpu_vec_isa
    from torch._inductor import config as generating
    from torch._inductor.graph import GraphLowering

    from napkin.accounting.compiled.wrapper import make_program, writing_programs

    inductor: Any = compile_fx
    if count_calls(graph.graph) == 0:
        return inductor.make_boxed_func(graph.forward)
    keywords.setdefault("static_input_idxs", ())
    keywords["cudagraphs"] = inductor.BoxedBool(False)
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(generating.patch(settings))
        stack.enter_context(inductor.DebugContext())
        stack.enter_context(inductor.V.set_debug_handler(inductor.DebugContext()))
        if cuda is not None:
            stack.enter_context(fake_cuda_device(cuda))
            example_inputs = moved_to_cuda(graph, example_inputs)
        # Which vectors this CPU has is found out with a C++ compiler; they change no buffer.
        stack.enter_context(patch.object(cpu_vec_isa, "pick_vec_isa", lambda: cpu_vec_isa.invalid_vec_isa))
        stack.enter_context(writing_programs(keywords))
        stack.enter_context(patch.object(GraphLowering, "compile_to_module", make_program))
        compiled: Any = inductor._InProcessFxCompile().codegen_and_compile(graph, example_inputs, [], keywords)
    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        shapes = inductor.shape_env_from_inputs(example_inputs)
        number: Any = int if shapes is None else shapes.evaluate_symexpr
        for strides in compiled.output_strides:
            context.output_strides.append(None if strides is None else tuple(map(number, strides)))
    return compiled
