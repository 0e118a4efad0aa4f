"""What ends an answer, where the tokenizer knows few characters."""

from napkin.chats.chat_encoder import ChatEncoder
from napkin.data.token_file import SEPARATOR
from napkin.tokenizer.word_level import CharacterTokenizer


def test_a_vocabulary_of_roles_and_digits_has_an_end() -> None:
    tokenizer = CharacterTokenizer("".join(sorted(set("user: assistant:\n0123456789+="))), [SEPARATOR])
    end = tokenizer.special_tokens[SEPARATOR]
    encoder = ChatEncoder(tokenizer, None, (end,), stop_ids=(end,))
    assert encoder.end_ids == (end,)
    encoder.close()
