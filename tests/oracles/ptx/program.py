"""PTX as Triton's compiler writes it, parsed: the instructions of one kernel, its labels, registers and parameters."""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass


class PtxError(Exception):
    """A kernel does what it must not, or has an instruction that this oracle does not know."""


@dataclass(frozen=True, slots=True)
class Register:
    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """A constant: an integer, or the bits of a float."""

    bits: int


@dataclass(frozen=True, slots=True)
class Name:
    """A label, a parameter, a special register or the symbol of shared memory."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    base: "Register | Name"
    offset: int


@dataclass(frozen=True, slots=True)
class Vector:
    items: tuple["Register | Immediate | Name", ...]
    """The name _ is a place that nobody looks at."""


Operand = Register | Immediate | Name | Address | Vector


@dataclass(frozen=True, slots=True)
class Guard:
    """The predicate of an instruction: threads without it skip the instruction."""

    register: Register
    negated: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Guard | None
    text: str
    line: int

    @property
    def types(self) -> tuple[str, ...]:
        return tuple(each for each in self.modifiers if TYPE.fullmatch(each))

    @property
    def results(self) -> list[str]:
        """The registers that it writes."""
        first = self.operands[:1] if self.opcode not in ("st", "stmatrix", "bra") else ()
        items = [item for each in first for item in (each.items if isinstance(each, Vector) else (each,))]
        return [each.name for each in items if isinstance(each, Register)]


@dataclass(frozen=True)
class Program:
    name: str
    threads: int
    """The number of threads of a block."""
    parameters: dict[str, str]
    """The type of each parameter by its name, in order."""
    widths: dict[str, int]
    """The bits of a register by the letters of its name; a predicate has 1."""
    instructions: list[Instruction]
    labels: dict[str, int]

    def width(self, register: Register) -> int:
        return self.widths[register.name.rstrip("0123456789")]


TYPE = re.compile(r"(pred|b\d+|u\d+|s\d+|f\d+|f16x2|bf16|bf16x2|tf32|e4m3x2|e5m2x2)")
_NUMBER = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?")


def parse(ptx: str) -> Program:
    """The only kernel in a text."""
    text = re.sub(r"//.*", "", ptx)
    entry = re.search(r"\.entry\s+(\w+)\s*\(([^)]*)\)[^{]*", text)
    threads = re.search(r"\.reqntid\s+(\d+)", text)
    if entry is None or threads is None:
        raise PtxError("the text has no kernel with a fixed number of threads")
    name, parameters = entry.groups()
    widths: dict[str, int] = {}
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    first_line = text.count("\n", 0, entry.end()) + 1
    for line, statement in _statements(_in_braces(text[entry.end() :]), first_line):
        if statement.endswith(":"):
            labels[statement[:-1]] = len(instructions)
        elif declared := re.fullmatch(r"\.reg \.(\w+) (.+)", statement):
            for each in declared[2].split(","):
                letters = each.strip().partition("<")[0].rstrip("0123456789")
                widths[letters] = 1 if declared[1] == "pred" else int(declared[1][1:])
        elif not statement.startswith((".loc", ".pragma")):
            instructions.append(_instruction(statement, line))
    return Program(
        name,
        int(threads[1]),
        {each: kind for kind, each in re.findall(r"\.param\s+\.(\w+)[^,]*?(\w+)\s*(?:,|$)", parameters)},
        widths,
        instructions,
        labels,
    )


def _in_braces(text: str) -> str:
    depth = 0
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return text[1 : brace.start()]
    raise PtxError("the kernel has no end")


def _statements(body: str, line: int) -> Iterator[tuple[int, str]]:
    """Statements without their semicolons, labels with their colons, each with its line."""
    pending = ""
    for part in re.split(r"(;|(?<=\w):(?=\s)|\n)", body):
        if part == "\n":
            line += 1
        elif part == ":":
            yield line, f"{pending}:"
        elif part.strip() not in ("", ";", "{", "}"):
            pending = part.strip()
            if not pending.startswith("$L"):
                yield line, " ".join(pending.split())


def _instruction(statement: str, line: int) -> Instruction:
    found = re.fullmatch(r"(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*)", statement)
    if found is None:
        raise PtxError(f"line {line}: {statement} is not an instruction")
    negated, predicate, opcode, rest = found.groups()
    guard = None if predicate is None else Guard(Register(predicate), bool(negated))
    opcode, *modifiers = opcode.split(".")
    operands = tuple(_operand(each) for each in _split(rest))
    return Instruction(opcode, tuple(modifiers), operands, guard, statement, line)


def _split(operands: str) -> list[str]:
    """What commas divide outside of braces and brackets."""
    return [each.strip() for each in re.split(r",(?![^{\[]*[}\]])", operands) if each.strip()]


@functools.cache
def _operand(text: str) -> Operand:
    if text.startswith("{"):
        items = tuple(_operand(each.strip()) for each in text.strip("{} ").split(","))
        return Vector(tuple(each for each in items if isinstance(each, Register | Immediate | Name)))
    if text.startswith("["):
        base, _, offset = (each.strip() for each in text.strip("[] ").partition("+"))
        start = _operand(base)
        if not isinstance(start, Register | Name):
            raise PtxError(f"{text} is not an address")
        return Address(start, int(offset, 0) if offset else 0)
    if re.fullmatch(r"%?[a-z]+\d+", text):
        return Register(text)
    if found := re.fullmatch(r"0[fFdD]([0-9a-fA-F]+)", text):
        return Immediate(int(found[1], 16))
    if _NUMBER.fullmatch(text):
        return Immediate(int(text.rstrip("U"), 0))
    if re.fullmatch(r"[%$\w.]+", text):
        return Name(text)
    raise PtxError(f"{text} is not an operand")
