"""Copies of items are found however they are written; what only resembles them is not."""

import html
import random
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from napkin import NapkinError
from napkin.data import Document, TokenFile, standard_library, write_token_file
from napkin.evaluation import find_contamination
from napkin.evaluation.contamination import documents_of_token_file, letters, looked_for
from napkin.evaluation.tasks import Item
from napkin.evaluation.tasks.published import lettered
from napkin.tokenizer import train_bpe

WORDS = "river metal source winter market window paper letter garden number teacher island question bridge".split()


def questions(count: int, seed: int = 0) -> list[Item]:
    chance = random.Random(seed)
    return [
        Item(
            f"item {index}",
            f"Which of the following holds? {' '.join(chance.choices(WORDS, k=16))} {chance.randrange(10**9)}?",
            ("yes", "no"),
        )
        for index in range(count)
    ]


def disguised(text: str, chance: random.Random) -> str:
    text = "\n".join(textwrap.wrap(text, chance.randint(15, 60)))
    text = chance.choice([str.upper, str.lower, str.title])(text)
    return text.replace(" ", "  ").replace("?", " ?!").replace("e", "e" if chance.random() < 0.5 else "e\u00ad")


def test_planted_copies_are_found_and_nothing_else() -> None:
    items = questions(400)
    chance = random.Random(1)
    planted = chance.sample(items, 100)
    library = [document.text for document in standard_library()][:120]
    copies = [disguised(item.prompt, chance) for item in planted] + [""] * 20
    texts = [each[: len(each) // 2] + copy + each[len(each) // 2 :] for each, copy in zip(library, copies, strict=True)]
    found = find_contamination(items, (Document(f"file {index}", each) for index, each in enumerate(texts)))
    assert found.contaminated == {item.name for item in planted}
    assert {each.item: each.document for each in found.found} == {
        item.name: f"file {index}" for index, item in enumerate(planted)
    }
    assert all(each.share == 1 for each in found.found)
    assert found.clean(["item 0", planted[0].name]) == [items[0] not in planted, False]
    assert (found.items, found.documents) == (400, 120)
    assert found.bytes == sum(len(each.encode()) for each in texts)


def test_half_an_item_is_not_the_item() -> None:
    item = questions(1)[0]
    half = item.prompt[: len(item.prompt) // 2]
    assert not find_contamination([item], [Document("text", half)]).found
    assert find_contamination([item], [Document("text", half)], share=0.2).found


def test_halves_far_apart_are_not_a_copy() -> None:
    item = questions(1)[0]
    middle = len(item.prompt) // 2
    filler = "nothing of interest stands here " * 40
    apart = Document("text", item.prompt[:middle] + filler + item.prompt[middle:])
    assert not find_contamination([item], [apart]).found
    assert find_contamination([item], [Document("text", item.prompt[:middle] + "\n*\n" + item.prompt[middle:])]).found


def test_words_that_all_items_share_are_no_contamination() -> None:
    head = "This question refers to the following information, which is given in the table at the top of the page: "
    items = [Item(f"{n}", f"{head}{n}", ("a", "b")) for n in range(20)]
    assert not find_contamination(items, [Document("text", head * 3)]).found


def test_a_copy_across_parts_of_a_document_is_found() -> None:
    item = questions(1)[0]
    middle = len(item.prompt) // 2
    parts = [
        Document("long", "x y z " * 500 + item.prompt[:middle]),
        Document("long", item.prompt[middle:] + " and so on", continues=True),
    ]
    assert find_contamination([item], parts).contaminated == {"item 0"}
    apart = [parts[0], Document("another", parts[1].text)]
    assert not find_contamination([item], apart).found


def test_items_of_other_scripts_are_found() -> None:
    text = "Какая река, впадающая в Рейн у города Кобленц, берёт начало в горах Вогезы на территории Франции?"
    item = Item("river", text, ("Мозель", "Рейн"))
    copy = Document("текст", "Начало. " + text.upper().replace(" ", "\n") + " Конец.")
    assert find_contamination([item], [copy]).contaminated == {"river"}
    assert not find_contamination([item], [Document("english", "nothing of it " * 100)]).found


def test_a_short_prompt_is_looked_for_with_its_answer() -> None:
    short = Item("short", "Who wrote it?", ("A man whose name nobody in that town remembered any more", "no one"))
    whole = "Who wrote it? A man whose name nobody in that town remembered any more"
    assert looked_for(short)[-1] == (whole,)
    found = find_contamination([short, Item("tiny", "2 + 2 =", ("4", "5"))], [Document("t", whole * 2)])
    assert found.contaminated == {"short"}
    assert found.too_short == ("tiny",)


def test_letters_are_those_of_the_text() -> None:
    assert letters("A naïve waiter in the old café, 1.5 × 2") == b"anaivewaiterintheoldcafe152"
    marked = "<p class='x'>Ｔｈｅ&nbsp;ﬁ<b>rst</b> &#49;&eacute;</p> 𝐛𝐨𝐥𝐝 e\u0301 <!-- no --> one of many letters"
    assert letters(marked) == b"thefirst1eboldeoneofmanyletters"
    assert letters("if a <b and c> d: x = List<String>") == b"ifabandcdxlist"
    assert letters("ДА, нет!").decode() == "данет"


def multiple_choice(count: int, question_words: int, choice_words: int) -> list[Item]:
    chance = random.Random(7)

    def some(words: int) -> str:
        return f"{' '.join(chance.choices(WORDS, k=words))} {chance.randrange(10**6)}"

    return [
        lettered(f"{n}", f"{some(question_words)}?", [some(choice_words) for _ in range(4)], n % 4, "")
        for n in range(count)
    ]


def with_choices_moved(item: Item) -> str:
    question, *choices = re.split(r"\n[A-D]\. |\nAnswer:", item.prompt)[:-1]
    moved = [choices[2], choices[0], choices[3], choices[1]]
    return question + "".join(f"\n({letter}) {choice}" for letter, choice in zip("abcd", moved, strict=True))


def in_html(text: str) -> str:
    words = [f"<b>{word}</b>" if n % 3 else html.escape(word) for n, word in enumerate(text.split())]
    return "<div class='question'>" + "&nbsp;\n<span id=a>".join(words) + "</div>"


def in_full_width(text: str) -> str:
    return text.translate({point: point + 0xFEE0 for point in range(0x21, 0x7F)})


def in_bold(text: str) -> str:
    return "".join(chr(0x1D400 + ord(c) - 65) if c.isascii() and c.isupper() else c for c in text.upper())


def with_accents(text: str) -> str:
    return text.replace("e", "é").replace("a", "a\u0308")


@pytest.mark.parametrize(("question_words", "choice_words"), [(14, 3), (4, 9)])
@pytest.mark.parametrize(
    "disguise",
    [
        lambda item: item.prompt,
        with_choices_moved,
        lambda item: in_html(item.prompt),
        lambda item: in_full_width(item.prompt),
        lambda item: in_bold(item.prompt),
        lambda item: with_accents(item.prompt),
        lambda item: in_html(in_full_width(with_choices_moved(item))),
    ],
)
def test_copies_in_other_letters_markup_and_order_are_found(
    question_words: int, choice_words: int, disguise: Callable[[Item], str]
) -> None:
    """Of long questions with short choices and of short questions with long ones, 18 of 60 are in the text."""
    items = multiple_choice(60, question_words, choice_words)
    filler = "Nothing of interest stands here. Später, im Café, nothing stands there, either. " * 5
    found = find_contamination(items, [Document(f"{n}", filler + disguise(items[n]) + filler) for n in range(18)])
    assert found.contaminated == {item.name for item in items[:18]}
    assert not found.too_short


def test_choices_alone_are_no_copy_of_a_long_question() -> None:
    choices = [f"{' '.join(WORDS[::-1])} {n}" for n in range(4)]
    item = lettered("x", f"Which of these {' '.join(WORDS[:12])}?", choices, 0, "")
    assert not find_contamination([item], [Document("t", with_choices_moved(item).partition("\n")[2])]).found


def test_questions_that_many_items_share_are_told_by_their_choices() -> None:
    question = "Which of the following statements about the situation in the picture above is true?"
    choices = [[f"{word} {n} {''.join(WORDS[n : n + 4])}" for word in WORDS[:4]] for n in range(8)]
    items = [lettered(f"{n}", question, each, 0, "") for n, each in enumerate(choices)]
    found = find_contamination(items, [Document("t", items[3].prompt), Document("u", question * 3)])
    assert found.contaminated == {"3"}
    assert not found.too_short


def test_what_cannot_be_looked_for_is_refused() -> None:
    with pytest.raises(NapkinError, match="share of windows is 0"):
        find_contamination(questions(1), [], share=0)
    with pytest.raises(NapkinError, match="no items"):
        find_contamination([], [])


def test_copies_in_token_files_are_found(tmp_path: Path) -> None:
    items = questions(3)
    texts = ["nothing here", f"before {items[1].prompt.upper()} after", "nor here"]
    tokenizer = train_bpe(texts, vocab_size=300)
    path = write_token_file(
        tmp_path / "train.tokens", [Document(f"{n}", each) for n, each in enumerate(texts)], tokenizer
    )
    documents = list(documents_of_token_file(TokenFile.open(tmp_path / "train.tokens"), tokenizer))
    assert path is not None
    assert [each.text for each in documents] == texts
    assert [each.continues for each in documents] == [False] * 3
    found = find_contamination(items, documents)
    assert [(each.item, each.document) for each in found.found] == [("item 1", "train.tokens#2")]
    with pytest.raises(NapkinError):
        list(documents_of_token_file(TokenFile.open(tmp_path / "train.tokens"), train_bpe(["other"], vocab_size=260)))


def test_tags_with_attributes_without_a_value_are_no_letters_of_an_item() -> None:
    item = questions(1, seed=5)[0]
    for tag in ("<input type=radio checked>", "<OPTION Selected>", "<details open class='a'>", "<input disabled />"):
        found = find_contamination([item], [Document("page", item.prompt.replace(" ", f" {tag} "))])
        assert found.contaminated == {item.name}, tag
    # What is compared is not a tag: its letters stay.
    assert letters("if a <b and c> d: open") == letters("if a b and c d: open")
