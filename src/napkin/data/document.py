"""A document of a corpus: its name, and its text as a string or as UTF-8, whichever is asked for."""

from functools import cached_property
from hashlib import blake2b

from napkin.errors import NapkinError
from napkin.tokenizer.text_input import utf8


class Document:
    """A text, or a part of one, and its name for messages; `continues` if it is a further part of the preceding one.

    It is given as text, or as `data`, which must be valid UTF-8; the other is made when it is asked for, so that a text
    that is read and encoded as bytes never becomes a string.

    >>> Document("greeting", data=b"hello")
    Document(name='greeting', text='hello', continues=False)
    """

    def __init__(
        self, name: str, text: str | None = None, continues: bool = False, *, data: bytes | None = None
    ) -> None:
        if (text is None) == (data is None):
            raise NapkinError(f"document {name!r} is given {'neither' if text is None else 'both'}: give text or data")
        self.name = name
        self.continues = continues
        # Entries of the instance's dictionary take the place of the cached properties below.
        if text is not None:
            self.__dict__["text"] = text
        else:
            self.__dict__["data"] = data

    @cached_property
    def text(self) -> str:
        """The text as a string."""
        return self.data.decode()

    @cached_property
    def data(self) -> bytes:
        """The text as UTF-8. Raises NapkinError for a lone surrogate."""
        return utf8(self.text, f"'{self.name}'")

    @cached_property
    def digest(self) -> bytes:
        """The BLAKE2b hash of the UTF-8, eight bytes."""
        return blake2b(self.data, digest_size=8).digest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Document):
            return NotImplemented
        return (self.name, self.text, self.continues) == (other.name, other.text, other.continues)

    def __hash__(self) -> int:
        return hash((self.name, self.text, self.continues))

    def __repr__(self) -> str:
        return f"Document(name={self.name!r}, text={self.text!r}, continues={self.continues!r})"
