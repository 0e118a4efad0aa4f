import pytest
from hypothesis import given
from hypothesis import strategies as st

from napkin.inference.generation import TextStream
from napkin.tokenizer import ByteTokenizer

BYTES = ByteTokenizer(special_tokens=())


def streamed(data: bytes, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream, pieces = TextStream(BYTES, stop), []
    for byte in data:
        pieces.append(stream.push(byte))
        if stream.stopped:
            return pieces, stream
    return [*pieces, stream.finish()], stream


@given(st.binary(max_size=40) | st.text(max_size=20).map(str.encode))
def test_pieces_together_are_the_decoded_text(data: bytes) -> None:
    assert "".join(streamed(data)[0]) == BYTES.decode(data)


def test_characters_are_never_cut() -> None:
    pieces, _ = streamed("aé漢🎈".encode())
    assert [piece for piece in pieces if piece] == ["a", "é", "漢", "🎈"]


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_the_text_ends_before_the_first_stop_text_and_shows_no_part_of_it(text: str, stops: list[str]) -> None:
    pieces, stream = streamed(text.encode(), tuple(stops))
    # After each byte, as a reader who looks for stop texts in all of the text so far would see it.
    found = [end for end in range(len(text) + 1) if any(stop in text[:end] for stop in stops)]
    seen = text[: found[0]] if found else text
    expected = seen[: min(seen.find(stop) for stop in stops if stop in seen)] if found else text
    assert "".join(pieces) == expected
    assert stream.stopped == bool(found)


@pytest.mark.parametrize(("text", "held"), [("the e", "e"), ("the en", "en"), ("the ex", ""), ("ende", "e")])
def test_only_what_may_become_a_stop_text_waits(text: str, held: str) -> None:
    stream = TextStream(BYTES, ("ending",))
    shown = "".join(stream.push(byte) for byte in text.encode())
    assert shown == text.removesuffix(held) if held else shown == text
    assert stream.finish() == held
