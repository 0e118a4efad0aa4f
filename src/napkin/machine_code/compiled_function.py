"""Functions compiled with numba, unchecked, and the loading and calling of their machine code.

numba's own cache is not used, because it is made of pickles. A function that Python calls takes int64 and returns int64
or nothing, so its object code needs no wrapper, and is loaded by LLVM alone; see loading.py for the file. numba's
run-time library is not there then: such functions use no arrays of numba's, only addresses of what their caller made.
numba itself, a tenth of a second of a start, is imported when something is compiled: until then, what only compiled
functions call is deferred.
"""

import ctypes
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from inspect import unwrap
from itertools import chain
from typing import Any, ClassVar, Self

_OPTIONS = {"nogil": True, "boundscheck": False, "error_model": "numpy"}

# By module. Functions are unwrapped first, because a runtime type checker may have wrapped them in one that numba
# cannot compile.
_functions: defaultdict[str, list["CompiledFunction"]] = defaultdict(list)
# LLVM's engines own the machine code: keep them alive.
_engines: list[Any] = []


class CompiledFunction:
    """Decorate a function that Python calls, or that compiled functions call by its address.

    All arguments are int64: numbers, or addresses of arrays that the caller keeps alive. Calls release the GIL.
    `options` are those of numba.njit, beside the ones that all functions have. Of a module's functions, each has a
    name of its own; None is that of the Python function.
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None, **options: Any) -> None:
        self.function = unwrap(function)
        self.options = _OPTIONS | options
        self.__doc__ = function.__doc__
        self.name = name or self.function.__name__
        self.n_arguments = self.function.__code__.co_argcount
        self._code: bytes | None = None
        _functions[function.__module__].append(self)

    @classmethod
    def with_options(cls, **options: Any) -> Callable[[Callable[..., Any]], Self]:
        """The decorator with options, such as fastmath={"reassoc"}."""
        return lambda function: cls(function, **options)

    def __call__(self, *arguments: int) -> int:
        """Run its machine code; 0 if the function returns nothing."""
        return self._call(*arguments)

    @cached_property
    def address(self) -> int:
        """The address of its machine code, which is compiled now if it was not cached before."""
        return self._loaded.get_function_address(self.name)

    @cached_property
    def parts_address(self) -> int:
        """The address of a C function by which the threads of an OpenMP team share several calls, its parts.

        Its argument is the address of int64: the addresses of omp_get_thread_num and omp_get_num_threads, the number of
        parts, and the arguments of each. Of n threads, thread i makes the calls i, i + n, i + 2n, ... Without these
        functions, which are 0 then, the first call is made.
        """
        return self._loaded.get_function_address(_parts_name(self.name))

    def call_alone(self, arguments: Sequence[int]) -> None:
        """Run its machine code without a result; ctypes would convert many arguments one by one, in microseconds."""
        self._run_parts(_int64s(len(arguments) + 3).pack(0, 0, 1, *arguments))

    def of_parts(self, thread_number: int, n_threads: int, parts: Sequence[Sequence[int]]) -> bytes:
        """What `parts_address` takes, of two functions' addresses and the arguments of each part."""
        size = 3 + len(parts) * self.n_arguments
        return _int64s(size).pack(thread_number, n_threads, len(parts), *chain.from_iterable(parts))

    def builtin(self, *numbers: int) -> Callable[[Any], Any]:
        """A function of one Python object that runs its machine code, with a tenth of the overhead of a call; it keeps
        the GIL.

        The machine code takes two addresses: `numbers`, as int64, begin BEFORE_BYTES after the first, and the object
        is at the second. It returns the address of a new reference, or 0 after an error of Python's.
        """
        table = b"".join(number.to_bytes(8, sys.byteorder, signed=True) for number in numbers)
        return _new_builtin(ctypes.addressof(self._method), table, None)

    @cached_property
    def _method(self) -> "_Method":
        # Stored with this function, which lives as long as the program: builtins refer to it.
        return _Method(self.name.encode(), self.address, _ONE_ARGUMENT, None)

    @cached_property
    def _loaded(self) -> Any:
        return _load(_object_code(self) if self._code is None else self._code)

    @cached_property
    def _run_parts(self) -> Callable[[bytes], None]:
        return ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self.parts_address)

    @cached_property
    def _call(self) -> Callable[..., int]:
        return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * self.n_arguments)(self.address)


@cache
def _int64s(n: int) -> struct.Struct:
    return struct.Struct(f"{n}q")


class _Method(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("documentation", ctypes.c_char_p),
    )


_ONE_ARGUMENT = 8
BEFORE_BYTES = bytes.__basicsize__ - 1
"""What stands before the bytes of a bytes object, in bytes."""

_new_builtin = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
    ("PyCFunction_NewEx", ctypes.pythonapi)
)


def python_function(name: str) -> int:
    """The address of a function of Python's C interface."""
    return ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0


class Deferred:
    """What compiled functions call, made by `make` when the first of them is compiled: a function or an intrinsic of
    numba."""

    instances: ClassVar[list["Deferred"]] = []

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.instances.append(self)

    @cached_property
    def numba_object(self) -> Any:
        """What numba knows it by."""
        return self._make()

    def __call__(self, *arguments: Any) -> Any:
        """Call it from Python, as tests do."""
        return self.numba_object(*arguments)

    def __getattr__(self, name: str) -> Any:
        # numba looks for the options and the source of a function that is to be compiled with its caller's.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.numba_object, name)


def _tell_numba() -> None:
    """Have numba take what is deferred for what it makes, all of it now: numba must know it before it compiles."""
    from numba.core import registry
    from numba.core.typing.typeof import typeof_impl

    target: Any = registry.cpu_target

    def type_of(deferred: Deferred, _: Any) -> Any:
        return target.typing_context.resolve_value_type(deferred.numba_object)

    typeof_impl.register(Deferred, type_of)
    for deferred in Deferred.instances:
        _ = deferred.numba_object


def jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that only compiled functions call; it becomes a part of their machine code."""
    return jitted_with()(function)


def jitted_with(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`jitted` with options of numba.njit: its own fastmath, or inline="always" to be compiled with its caller's."""

    def decorate(function: Callable[..., Any]) -> Deferred:
        def make() -> Any:
            import numba

            return numba.njit(**_OPTIONS | options)(unwrap(function))

        return Deferred(make)

    return decorate


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """`jitted` for what inner loops call: LLVM inlines it, however long. A call costs some twenty instructions."""
    return jitted_with(forceinline=True)(function)


def processor_features() -> frozenset[str]:
    """The features of the processor that functions are compiled for, by LLVM's names: this machine's, or those of
    NUMBA_CPU_FEATURES. For what emits instructions, while it does."""
    from numba.core import registry

    target: Any = registry.cpu_target
    asked = target.target_context.codegen().magic_tuple()[2]
    return frozenset(each[1:] for each in asked.split(",") if each.startswith("+"))


def compile_module(module: str) -> dict[str, bytes]:
    """The object code of the compiled functions of an imported module, by name."""
    return {function.name: _object_code(function) for function in _functions[module]}


def load_module(module: str, code: dict[str, bytes]) -> None:
    """Give the compiled functions of an imported module their object code; each is linked when it is first called."""
    for function in _functions[module]:
        function._code = code[function.name]


def _parts_name(name: str) -> str:
    return f"{name}.parts"


def _load(object_code: bytes) -> Any:
    """The engine that holds a function's machine code, for as long as the process lives."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    # An engine each: functions that several of them call have one name, and a copy in each.
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(object_code))
    engine.finalize_object()
    _engines.append(engine)
    return engine


def _object_code(function: CompiledFunction) -> bytes:
    """Compile a function, a C function of its name that calls it, and one by which threads share calls of that."""
    from llvmlite import ir
    from numba import types
    from numba.core import compiler, registry
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.dispatcher import _FunctionCompiler  # pyright: ignore[reportAttributeAccessIssue]

    class NativeCompiler(_FunctionCompiler):
        def _customize_flags(self, flags: Any) -> Any:
            # numba's own wrappers would need Python and numba at run time.
            flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
            # The C function is added first.
            flags.no_compile = True
            return flags

    arguments = (types.int64,) * function.n_arguments
    with global_compiler_lock:
        _tell_numba()
        native = NativeCompiler(
            function.function, registry.cpu_target, function.options, {}, pipeline_class=compiler.Compiler
        )
        result = native.compile(arguments, None)
        returned, context, library = result.signature.return_type, result.target_context, result.library
        int64 = ir.IntType(64)
        module = library.create_ir_module(f"{function.name}.c")
        wrapper = ir.Function(module, ir.FunctionType(int64, [int64] * len(arguments)), function.name)
        builder = ir.IRBuilder(wrapper.append_basic_block())
        callee = context.declare_function(module, result.fndesc)
        _, value = context.call_conv.call_function(builder, callee, returned, arguments, wrapper.args)
        builder.ret(int64(0) if returned == types.none else context.cast(builder, value, returned, types.int64))
        _add_parts(module, wrapper)
        library.add_ir_module(module)
        library.finalize()
        needed = {each.name for each in library._final_module.functions if each.is_declaration}
        if any(name.startswith("NRT_") for name in needed):
            raise TypeError(f"{function.name}: arrays need numba's run-time library; use addresses")
        return library.serialize_using_object_code()[2][0]


def _add_parts(module: Any, function: Any) -> None:
    """Add what `parts_address` describes to an LLVM module with that function."""
    from llvmlite import ir

    int32, int64 = ir.IntType(32), ir.IntType(64)
    address = ir.FunctionType(int32, []).as_pointer()
    parts = ir.Function(module, ir.FunctionType(ir.VoidType(), [int64.as_pointer()]), _parts_name(function.name))
    entry, alone, together, ask, call, leave = (
        parts.append_basic_block(name) for name in ("entry", "alone", "together", "ask", "call", "leave")
    )
    builder, numbers = ir.IRBuilder(entry), parts.args[0]

    def number(index: Any) -> Any:
        return builder.load(builder.gep(numbers, [index]))

    def make_call(part: Any) -> None:
        first = builder.add(builder.mul(part, int64(len(function.args))), int64(3))
        builder.call(function, [number(builder.add(first, int64(i))) for i in range(len(function.args))])

    builder.cbranch(builder.icmp_signed("==", number(int64(0)), int64(0)), alone, together)
    builder.position_at_end(alone)
    make_call(int64(0))
    builder.ret_void()
    builder.position_at_end(together)
    thread, n_threads = (
        builder.sext(builder.call(builder.inttoptr(number(int64(i)), address), []), int64) for i in range(2)
    )
    n_parts = number(int64(2))
    builder.branch(ask)
    builder.position_at_end(ask)
    part = builder.phi(int64)
    builder.cbranch(builder.icmp_signed("<", part, n_parts), call, leave)
    builder.position_at_end(call)
    make_call(part)
    part.add_incoming(thread, together)
    part.add_incoming(builder.add(part, n_threads), call)
    builder.branch(ask)
    builder.position_at_end(leave)
    builder.ret_void()
