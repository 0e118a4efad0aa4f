"""GPT-2's representation of bytes as text: each byte is one printable character; a space is Ġ, a line feed Ċ.

Bytes that are printable in Latin-1 represent themselves; the others, in order, are the characters from U+0100 on.
"""

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted(set(range(256)) - set(_PRINTABLE))

_CHARACTERS = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}
_BYTES = {character: byte for byte, character in _CHARACTERS.items()}


def to_characters(token: bytes) -> str:
    """A token as text.

    >>> to_characters(b" the")
    'Ġthe'
    """
    return "".join(map(_CHARACTERS.__getitem__, token))


def to_bytes(characters: str) -> bytes | None:
    """The token of a text; None if a character represents no byte.

    >>> to_bytes("Ġthe"), to_bytes("a b")
    (b' the', None)
    """
    try:
        return bytes(map(_BYTES.__getitem__, characters))
    except KeyError:
        return None
