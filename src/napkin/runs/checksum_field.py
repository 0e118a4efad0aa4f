"""The last field of a JSON object in a run's folder: "crc32", the CRC-32 of all bytes of the object before it.

    {"step": 1, "tokens": 512, "loss": 5.54, "previous_step": 0, "crc32": "9ae0daaf"}

CRC-32 (ISO 3309, as in zlib, gzip and PNG) notices every flipped bit and every run of up to 32 damaged bits. The object
stays JSON that other programs read, and objects of older runs, without the field, stay readable.
"""

import re
import zlib

FIELD = "crc32"

_AT_THE_END = re.compile(rb',\s*"crc32": "([0-9a-f]{8})"\s*\}\s*\Z')


def add_checksum(text: str) -> str:
    """The text of a JSON object that is not empty, with its checksum as the last field."""
    fields = text.rstrip().removesuffix("}").rstrip()
    before, end = (",\n  ", "\n}") if "\n" in fields else (", ", "}")
    return f'{fields}{before}"{FIELD}": "{crc32(fields.encode())}"{end}'


def verify_checksum(data: bytes) -> bool:
    """Whether a JSON object has a checksum. Raises ValueError where it is not that of the bytes before it."""
    found = _AT_THE_END.search(data)
    if found is None:
        return False
    actual = crc32(data[: found.start()])
    if found[1].decode() != actual:
        raise ValueError(f"its checksum is {found[1].decode()}, that of its contents {actual}")
    return True


def crc32(data: bytes) -> str:
    """CRC-32 in hexadecimal."""
    return f"{zlib.crc32(data):08x}"
