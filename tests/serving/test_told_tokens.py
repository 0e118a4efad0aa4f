"""Tokens of a tokenizer that puts a space before a text, in the text that a client sees."""

from napkin.inference.sampling import Draw
from napkin.serving.completion_job import GrowingText, placed_prompt
from napkin.tokenizer import CharacterBPETokenizer

WORDS = [" ", "t", "h", "e", "c", "a", "th", " th", " the", "ca", " ca"]
TOKENS = [*(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
ID = {word: 256 + i for i, word in enumerate(WORDS)}
PAIRS = [("t", "h"), (" ", "th"), (" th", "e"), ("c", "a"), (" ", "ca")]
TOKENIZER = CharacterBPETokenizer(TOKENS, [(ID[a], ID[b]) for a, b in PAIRS], {}, byte_ids=range(256))


def test_places_of_a_prompts_tokens_are_those_in_the_text_that_was_given() -> None:
    ids = TOKENIZER.encode("the cat é the")
    texts = [TOKENIZER.vocabulary[i] for i in ids]
    assert texts == [b" the", b" ca", b"t", b" ", b"\xc3", b"\xa9", b" the"]
    offsets = [token.offset for token in placed_prompt([Draw(i) for i in ids], TOKENIZER)]
    assert offsets == [0, 3, 6, 7, 8, 8, 9]


def test_what_continues_a_text_has_its_space_and_what_begins_one_has_not() -> None:
    for at_start, expected in ((True, "the ca"), (False, " the ca")):
        text = GrowingText(TOKENIZER, ["cat"], at_start=at_start)
        pieces = [text.push(Draw(ID[word]))[0] for word in (" the", " ca")]
        assert "".join(pieces) + text.finish()[0] == expected
