"""All threads of a launch at once: a register is an array with a number for each thread of each block.

Threads that have come to different instructions run by turns, those that are least far in the program first, so that
they meet again where their ways join. A thread at a barrier waits until all of its block are there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oracles.ptx.memory import SHARED_BASE, Clock, GlobalMemory, SharedMemory, Threads
from oracles.ptx.numbers import Numbers, bits_of, decode, unsigned
from oracles.ptx.program import Guard, Immediate, Instruction, Name, Operand, Program, PtxError, Register

Mask = NDArray[np.bool_]
MOST_STEPS = 2_000_000
"""Instructions of a launch: a loop without an end has more."""
_UNWRITTEN = 0x7FC0DEAD_7FC0DEAD
"""What is in a register of a thread that has not written it, where others have: NaN, or no address."""


@dataclass(frozen=True)
class Turn:
    """Threads that are at one instruction."""

    place: int
    mask: Mask


class Products:
    """wgmma's products that have begun: their groups, counted for all blocks together, which are in step."""

    def __init__(self) -> None:
        self.group = 0
        """The group that is not yet complete."""
        self.done = 0
        """All groups before this one have been waited for."""
        self._unfinished: dict[str, int] = {}
        self._adding = False

    def commit(self) -> None:
        self.group += 1

    def wait(self, pending: int) -> None:
        self.done = max(self.done, self.group - pending)
        self._unfinished = {name: group for name, group in self._unfinished.items() if group >= self.done}

    @contextmanager
    def adding_to(self, names: Sequence[str]) -> Iterator[None]:
        """While it lasts, a product reads and writes its result."""
        self._adding = True
        try:
            yield
        finally:
            self._adding = False
        self._unfinished.update(dict.fromkeys(names, self.group))

    def check(self, name: str) -> None:
        if self._unfinished and not self._adding and name in self._unfinished:
            raise PtxError(f"{name} is the result of a product that has not been waited for")


class Machine:
    """One launch of a kernel."""

    def __init__(
        self,
        program: Program,
        grid: tuple[int, int, int],
        arguments: dict[str, int],
        memory: GlobalMemory,
        shared_bytes: int,
        clock: Clock,
    ) -> None:
        self.program = program
        self.threads = program.threads
        self.blocks = int(np.prod(grid))
        self.clock = clock
        self.everyone = np.arange(self.blocks * self.threads)
        self.memory = memory
        self.shared = SharedMemory(shared_bytes, _shared_unit(program), clock)
        self.products = Products()
        self.arguments = arguments
        self.executed = 0
        self._registers: dict[str, Numbers] = {}
        self._written = {name for each in program.instructions for name in each.results}
        block, thread = np.divmod(self.everyone, self.threads)
        self._special = {
            "%tid.x": thread,
            "%laneid": thread % 32,
            "%ctaid.x": block % grid[0],
            "%ctaid.y": block // grid[0] % grid[1],
            "%ctaid.z": block // grid[0] // grid[1],
            "%ntid.x": np.full_like(block, self.threads),
            **{f"%nctaid.{axis}": np.full_like(block, n) for axis, n in zip("xyz", grid, strict=True)},
            "global_smem": np.full_like(block, SHARED_BASE),
        }

    def run(self) -> None:
        from oracles.ptx.instructions import execute

        turns = [Turn(0, np.ones(len(self.everyone), np.bool_))]
        waiting = np.zeros(len(self.everyone), np.bool_)
        resumes = np.zeros(len(self.everyone), np.int64)
        with np.errstate(all="ignore"):
            while turns:
                place = min(turn.place for turn in turns)
                mask = np.logical_or.reduce([turn.mask for turn in turns if turn.place == place])
                turns = [turn for turn in turns if turn.place != place]
                stop = min((turn.place for turn in turns), default=len(self.program.instructions))
                turn = self._until(stop, Turn(place, mask), execute)
                instruction = self.program.instructions[turn.place]
                if turn.place == stop:
                    turns.append(turn)
                elif instruction.opcode == "bra":
                    turns += self._branched(instruction, turn)
                elif _is_barrier(instruction) and instruction.guard is None:
                    if len(instruction.operands) != 1:
                        raise PtxError(f"{instruction.text}: a barrier of a part of a block is not known here")
                    waiting |= turn.mask
                    resumes[turn.mask] = turn.place + 1
                    turns += self._released(waiting, resumes)
                elif instruction.guard is not None:
                    raise PtxError(f"{instruction.text}: a thread that leaves, or waits, alone is not known here")
        if waiting.any():
            raise PtxError(f"thread {np.flatnonzero(waiting)[0]} waits at a barrier to which not all of its block come")

    def _until(self, stop: int, turn: Turn, execute: Callable[["Machine", Instruction, Mask | None], None]) -> Turn:
        """Run up to an instruction, or to the next that changes the way of threads."""
        if self.executed > MOST_STEPS:
            raise PtxError(f"{self.program.name} has not ended after {MOST_STEPS} instructions")
        everyone = bool(turn.mask.all())
        for place in range(turn.place, stop):
            instruction = self.program.instructions[place]
            self.executed += 1
            if instruction.opcode in ("bra", "ret") or _is_barrier(instruction):
                return Turn(place, turn.mask)
            mask = None if everyone else turn.mask
            if instruction.guard is not None:
                mask = turn.mask & self._allowed(instruction.guard)
                if not mask.any():
                    continue
                mask = None if mask.all() else mask
            try:
                execute(self, instruction, mask)
            except PtxError as error:
                raise PtxError(f"{self.program.name}, line {instruction.line}, {instruction.text}: {error}") from None
        return Turn(stop, turn.mask)

    def _branched(self, instruction: Instruction, turn: Turn) -> list[Turn]:
        (target,) = instruction.operands
        assert isinstance(target, Name)
        taken = turn.mask if instruction.guard is None else turn.mask & self._allowed(instruction.guard)
        turns = (Turn(self.program.labels[target.name], taken), Turn(turn.place + 1, turn.mask & ~taken))
        return [each for each in turns if each.mask.any()]

    def _released(self, waiting: Mask, resumes: Threads) -> list[Turn]:
        """Threads of the blocks that are complete; they no longer wait."""
        complete = waiting.reshape(self.blocks, self.threads).all(axis=1)
        freed = np.repeat(complete, self.threads)
        if not freed.any():
            return []
        self.clock.pass_barrier(freed)
        waiting &= ~freed
        return [Turn(int(place), freed & (resumes == place)) for place in np.unique(resumes[freed])]

    def _allowed(self, guard: Guard) -> Mask:
        predicate = self.raw(guard.register)
        return ~predicate if guard.negated else predicate

    def raw(self, operand: Operand) -> Numbers:
        """The bits of an operand of each thread, or of a constant."""
        match operand:
            case Register(name):
                if name not in self._registers:
                    if name in self._written:
                        raise PtxError(f"{name} is read before it is written")
                    # The compiler reads such a register where any number will do.
                    return np.asarray(_UNWRITTEN & 2 ** self.program.width(operand) - 1, np.uint64)
                self.products.check(name)
                return self._registers[name]
            case Immediate(bits):
                return np.asarray(bits & 2**64 - 1, np.uint64)
            case Name(name) if name in self._special:
                return self._special[name].astype(np.uint64)
            case _:
                raise PtxError(f"{operand} is not a number")

    def read(self, operand: Operand, kind: str) -> Numbers:
        return decode(self.raw(operand), kind)

    def write(self, register: Operand, raw: Numbers, mask: Mask | None) -> None:
        """Change a register of the threads of a mask, or of all."""
        if register == Name("_"):
            return
        assert isinstance(register, Register)
        width = self.program.width(register)
        self.products.check(register.name)
        dtype = np.bool_ if width == 1 else unsigned(width)
        raw = np.asarray(raw).astype(dtype, copy=False)
        if mask is not None:
            before = self._registers.get(register.name)
            raw = np.where(mask, raw, dtype(_UNWRITTEN & 2**width - 1) if before is None else before)
        self._registers[register.name] = raw if raw.ndim else np.broadcast_to(raw, len(self.everyone))

    def active(self, mask: Mask | None) -> Threads:
        return self.everyone if mask is None else np.flatnonzero(mask)

    def scatter(self, register: Operand, raw: Numbers, mask: Mask | None) -> None:
        """Change a register of the active threads, given one number for each of them."""
        if mask is not None:
            wide = np.zeros(len(self.everyone), raw.dtype)
            wide[mask] = raw
            raw = wide
        self.write(register, raw, mask)

    def gather(self, operand: Operand, kind: str, mask: Mask | None) -> Numbers:
        """The numbers of the active threads."""
        found = np.broadcast_to(self.read(operand, kind), len(self.everyone))
        return found if mask is None else found[mask]

    def warps(self, mask: Mask | None) -> Threads:
        """The active threads, [warps, 32]: whole warps, as instructions ask for in which a warp acts together."""
        active = self.active(mask)
        if len(active) % 32 or (active.reshape(-1, 32) // 32 != active[::32, None] // 32).any():
            raise PtxError("not all threads of a warp are there")
        return active.reshape(-1, 32)


def _is_barrier(instruction: Instruction) -> bool:
    """True of a barrier of the block: bar.warp.sync is no other than an instruction of a warp."""
    return instruction.opcode == "bar" and instruction.modifiers == ("sync",)


def _shared_unit(program: Program) -> int:
    """The bytes of the narrowest number that is read or written in shared memory."""
    accesses = (each for each in program.instructions if each.opcode in ("ld", "st", "ldmatrix"))
    return min((bits_of(each.types[-1]) // 8 for each in accesses if "shared" in ".".join(each.modifiers)), default=4)
