"""Reading a file as documents line by line: the plain twin of napkin.data.file_sections."""

from collections.abc import Iterator
from pathlib import Path

from napkin.data import Document
from napkin.data.file_sections import choose_split
from napkin.errors import NapkinError

SEPARATOR_LINES = (b"<|endoftext|>\n", b"<|endoftext|>\r\n", b"<|endoftext|>")


def read_line_by_line(path: Path, part_bytes: int | None = None) -> Iterator[Document]:
    number = 0
    for offset, data, of_whole_file, continues in sections(path, part_bytes):
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise NapkinError(f"'{path}' is not UTF-8 at byte {offset + error.start}") from error
        if continues or text.strip():
            number += not continues
            yield Document(str(path) if of_whole_file else f"{path}#{number}", text, continues)


def sections(path: Path, part_bytes: int | None) -> Iterator[tuple[int, bytes, bool, bool]]:
    lines: list[bytes] = []
    start = size = 0
    continues = divided = False
    wanted = part_bytes
    with open(path, "rb") as file:
        # A line may be as long as the file.
        while line := file.readline(-1 if part_bytes is None else part_bytes):
            begins_line = not lines or lines[-1].endswith(b"\n")
            if begins_line and line in SEPARATOR_LINES:
                divided = True
                yield start, b"".join(lines), False, continues
                start, lines, size, continues, wanted = start + size + len(line), [], 0, False, part_bytes
                continue
            lines.append(line)
            size += len(line)
            if wanted is None or size < wanted:
                continue
            data = b"".join(lines)
            split = choose_split(data)
            if split is None:
                wanted *= 2
                continue
            yield start, data[:split], not divided, continues
            # What follows a cut within a line does not begin one.
            rest = [data[split:]] if split < size or not data.endswith(b"\n") else []
            start, lines, size, continues, wanted = start + split, rest, size - split, True, part_bytes
    yield start, b"".join(lines), not divided, continues
