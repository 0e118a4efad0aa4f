"""The part of Python's pickle format that holds plain data: dicts, lists, tuples, strings, numbers, True, False, None.

torch writes memory snapshots in that format. A pickle is a program for a stack machine, and some of its instructions
call whatever function the file names. Here the plain ones alone exist: any other is refused by its name and place, so
that reading a file of a stranger builds values and does nothing else. Protocols 2 to 5 are read, and 4 is written, with
the instructions that viewers of snapshots know.
"""

import struct
from collections.abc import Callable, Iterator
from typing import Any

from napkin.errors import NapkinError

MOST_OBJECTS = 2**24
"""Values of a file, keys among them: what a file of a few bytes per value may take in memory is bounded by it."""
MOST_DEPTH = 64
MOST_BYTES_OF_INTEGER = 16
MOST_BYTES_OF_STRING = 2**20

_REFUSED = {
    "c": "GLOBAL", "R": "REDUCE", "b": "BUILD", "i": "INST", "o": "OBJ", "P": "PERSID", "Q": "BINPERSID",
    "\x81": "NEWOBJ", "\x82": "EXT1", "\x83": "EXT2", "\x84": "EXT4", "\x92": "NEWOBJ_EX", "\x93": "STACK_GLOBAL",
    "0": "POP", "1": "POP_MARK", "2": "DUP", "F": "FLOAT", "I": "INT", "L": "LONG", "S": "STRING", "T": "BINSTRING",
    "U": "SHORT_BINSTRING", "V": "UNICODE", "B": "BINBYTES", "C": "SHORT_BINBYTES", "\x8e": "BINBYTES8",
    "\x8f": "EMPTY_SET", "\x90": "ADDITEMS", "\x91": "FROZENSET", "\x96": "BYTEARRAY8", "\x97": "NEXT_BUFFER",
    "\x98": "READONLY_BUFFER", "\x8b": "LONG4", "p": "PUT", "g": "GET", "l": "LIST", "d": "DICT",
}  # fmt: skip
_CONSTANTS = {"N": None, "\x88": True, "\x89": False}
_EMPTY: dict[str, Callable[[], Any]] = {"}": dict, "]": list, ")": tuple}
_INTEGERS = {"J": "<i", "K": "<B", "M": "<H"}
_STRINGS = {"\x8c": "<B", "X": "<I", "\x8d": "<Q"}
_PUTS = {"q": "<B", "r": "<I"}
_GETS = {"h": "<B", "j": "<I"}
_TUPLES = {"\x85": 1, "\x86": 2, "\x87": 3}


def decode_plain_pickle(data: bytes, name: str) -> Any:
    """The value that a pickle of plain data holds; `name` is the file's, for messages.

    Lists and dicts that the file refers to twice are the same object, and may contain themselves.

    Raises NapkinError, naming the instruction and its offset, for all that is not plain data, for a file that ends
    early, and beyond the bounds above.
    """
    return _Decoder(data, name).run()


class _Decoder:
    def __init__(self, data: bytes, name: str) -> None:
        self.data, self.name = data, name
        self.at = self.start = 0
        self.objects = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        while True:
            self.start = self.at
            code = chr(self._take(1)[0])
            if code == ".":
                if len(self.stack) != 1 or self.marks:
                    self._refuse(f"it ends with {len(self.stack)} values in place of one")
                return self.stack[0]
            self._step(code)

    def _step(self, code: str) -> None:
        if code in _STRINGS:
            self._push(self._string(self._number(_STRINGS[code])))
        elif code in _GETS:
            key = self._number(_GETS[code])
            if key not in self.memo:
                self._refuse(f"it refers to value {key}, which it has not stored")
            self._push(self.memo[key])
        elif code in _INTEGERS:
            self._push(self._number(_INTEGERS[code]))
        elif code == "\x94":
            self.memo[len(self.memo)] = self._top()
        elif code in _PUTS:
            self.memo[self._number(_PUTS[code])] = self._top()
        elif code in _EMPTY:
            self._push(_EMPTY[code]())
        elif code == "(":
            if len(self.marks) == MOST_DEPTH:
                self._refuse(f"it is nested deeper than {MOST_DEPTH} levels")
            self.marks.append(len(self.stack))
        elif code in ("u", "s"):
            self._set_items(self._popped(2) if code == "s" else self._since_mark())
        elif code in ("e", "a"):
            self._append(self._popped(1) if code == "a" else self._since_mark())
        elif code == "t":
            self._push(tuple(self._since_mark()))
        elif code in _TUPLES:
            self._push(tuple(self._popped(_TUPLES[code])))
        elif code in _CONSTANTS:
            self._push(_CONSTANTS[code])
        elif code == "\x8a":
            size = self._number("<B")
            if size > MOST_BYTES_OF_INTEGER:
                self._refuse(f"an integer has {size} bytes, at most {MOST_BYTES_OF_INTEGER} are read")
            self._push(int.from_bytes(self._take(size), "little", signed=True))
        elif code == "G":
            self._push(self._number(">d"))
        elif code == "\x95":
            self._number("<Q")
        elif code == "\x80":
            version = self._number("<B")
            if not 2 <= version <= 5:
                self._refuse(f"it is of protocol {version}: 2 to 5 are read")
        else:
            self._refuse(f"the instruction {_REFUSED.get(code, f'0x{ord(code):02x}')} is not one of plain data")

    def _take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            self._refuse("it ends early")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _string(self, size: int) -> str:
        if size > MOST_BYTES_OF_STRING:
            self._refuse(f"a string has {size:,} bytes, at most {MOST_BYTES_OF_STRING:,} are read")
        return self._take(size).decode(errors="replace")

    def _push(self, value: Any) -> None:
        self.objects += 1
        if self.objects > MOST_OBJECTS:
            self._refuse(f"it has more than {MOST_OBJECTS:,} values")
        self.stack.append(value)

    def _top(self) -> Any:
        self._floor(1)
        return self.stack[-1]

    def _floor(self, size: int) -> None:
        """Refuse a file that takes more values than there are since the last mark."""
        if len(self.stack) - (self.marks[-1] if self.marks else 0) < size:
            self._refuse("it takes values that it has not made")

    def _popped(self, size: int) -> list[Any]:
        self._floor(size)
        taken = self.stack[-size:]
        del self.stack[-size:]
        return taken

    def _since_mark(self) -> list[Any]:
        if not self.marks:
            self._refuse("it takes values that it has not made")
        mark = self.marks.pop()
        taken = self.stack[mark:]
        del self.stack[mark:]
        return taken

    def _append(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is not list:
            self._refuse(f"it appends to a {type(target).__name__}")
        target.extend(values)

    def _set_items(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is not dict or len(values) % 2:
            self._refuse("it sets items of a value that is not a dict, or a key without a value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) not in (str, int):
                self._refuse(f"a {type(key).__name__} is a key: strings and integers are")
            target[key] = value

    def _refuse(self, why: str) -> Any:
        raise NapkinError(
            f"'{self.name}' is not read beyond byte {self.start:,}: {why}; a memory snapshot is plain data, as "
            "torch.cuda.memory._dump_snapshot writes it, or the same as JSON"
        )


def encode_plain_pickle(value: Any) -> bytes:
    """Write plain data as a pickle of protocol 4. Strings, and lists that are the same object, are stored once."""
    return b"".join([b"\x80\x04", *_encoded(value, {}), b"."])


def _encoded(value: Any, memo: dict[Any, int]) -> Iterator[bytes]:
    key = value if type(value) is str else id(value) if type(value) in (list, dict) else None
    if key is not None and key in memo:
        yield b"j" + struct.pack("<I", memo[key])
        return
    if value is None or type(value) is bool:
        yield next(code.encode("latin-1") for code, constant in _CONSTANTS.items() if constant is value)
    elif type(value) is int:
        yield _encoded_integer(value)
    elif type(value) is float:
        yield b"G" + struct.pack(">d", value)
    elif type(value) is str:
        text = value.encode(errors="replace")
        yield b"X" + struct.pack("<I", len(text)) + text
    elif type(value) is tuple:
        yield b"("
        for each in value:
            yield from _encoded(each, memo)
        yield b"t"
    elif type(value) in (list, dict):
        yield b"]" if type(value) is list else b"}"
    else:
        raise TypeError(f"a {type(value).__name__} is not plain data")
    if key is None:
        return
    memo[key] = len(memo)
    yield b"\x94"
    if type(value) is list:
        for each in value:
            yield from _encoded(each, memo)
            yield b"a"
    elif type(value) is dict:
        yield b"("
        for name, each in value.items():
            yield from _encoded(name, memo)
            yield from _encoded(each, memo)
        yield b"u"


def _encoded_integer(value: int) -> bytes:
    for code, form, low, high in (("K", "<B", 0, 2**8), ("M", "<H", 0, 2**16), ("J", "<i", -(2**31), 2**31)):
        if low <= value < high:
            return code.encode() + struct.pack(form, value)
    # Nine bytes hold addresses above 2^63 and their sign.
    size = 8 if -(2**63) <= value < 2**63 else MOST_BYTES_OF_INTEGER
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
