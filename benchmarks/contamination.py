"""Planted copies of a task's items in a training text: which are found, what else is, and how fast.

    python benchmarks/contamination.py mmlu/test/*.csv --text articles/ --planted 500

Items are read as `napkin evaluate --task` reads them. Copies are re-wrapped, re-cased, re-punctuated, or all of these;
in HTML, in letters of full width, or with their choices in another order. They stand within documents of the text
(Python's standard library, and what --text names). The exact search beside it is that of 13 words in a row, words
divided by spaces, as it is often done.
"""

import argparse
import html
import random
import re
import textwrap
import time
from collections.abc import Callable
from functools import partial

from napkin.data import Document, read_documents, standard_library
from napkin.evaluation.contamination import find_contamination
from napkin.evaluation.tasks import Item, read_task
from result_files import existing, heading
from turns import BRACKETS, in_turns, seconds_of, spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="+", type=existing)
    parser.add_argument("--text", nargs="*", default=[])
    parser.add_argument("--planted", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=6, help="times the text is searched, for the speed")
    options = parser.parse_args()
    heading("Planted copies of a task's items, found in a training text")
    items = read_task(options.task).items
    if options.planted >= len(items):
        parser.error(f"--planted {options.planted}: the task has {len(items):,} items, some must not be planted")
    text = [each.text for each in standard_library()]
    if options.text:
        text += [each.text for each in read_documents(options.text)]
    chosen = random.Random(0).sample(items, options.planted)
    planted = {item.name for item in chosen}
    by_name = {item.name: item for item in items}
    grams = {gram for item in chosen for gram in words_in_a_row(item)}
    related = sum(shares_text(item, grams) for item in items if item.name not in planted)
    size = sum(map(len, text)) / 1e6
    print(
        f"{len(items):,} items, {options.planted} planted in {size:.1f} MB of text; {related} others share half of "
        "their text with a planted one, such as a passage, and are no false positives\n"
    )
    print("| copies | found | 13 words found | false positives | of items |\n|---|---|---|---|---|")
    for name, disguise in DISGUISES.items():
        documents = plant(text, [disguise(whole(item), random.Random(index)) for index, item in enumerate(chosen)])
        found = find_contamination(items, documents)
        tellable = planted - set(found.too_short)
        right = len(found.contaminated & planted)
        wrong = {name for name in found.contaminated - planted if not shares_text(by_name[name], grams)}
        print(
            f"| {name} | {right / len(planted):.1%} ({right / max(len(tellable), 1):.1%} of those long enough) | "
            f"{exact(chosen, documents):.1%} | {len(wrong)} | {len(wrong) / (len(items) - len(planted)):.3%} |",
            flush=True,
        )
        if name == "all of these":
            for each in [each for each in found.found if each.item in wrong][:5]:
                print(f"<!-- {each.item}: {each.share:.0%} in {each.document} -->")
    clean = [Document(f"document {index}", each) for index, each in enumerate(text)]
    megabytes = sum(len(each.data) for each in clean) / 1e6
    # The processor's seconds of this one thread: other programs do not count.
    works = {
        "all": lambda: find_contamination(items, clean),
        "items": lambda: find_contamination(items, [Document("nothing", "nothing")]),
    }
    turns = {name: partial(seconds_of, work, time.process_time) for name, work in works.items()}
    seconds = in_turns(turns, options.rounds)
    rates = [megabytes / (whole - own) for whole, own in zip(seconds["all"], seconds["items"], strict=True)]
    print(
        f"\nwithout copies: {len(find_contamination(items, clean).found)} of {len(items):,} items found; "
        f"{megabytes:.0f} MB in {spread(seconds['all'])} s, {spread(seconds['items'])} s of which for the items: "
        f"{spread(rates, '{:.0f}'.format)} MB/s on one core. {BRACKETS}"
    )


def whole(item: Item) -> str:
    """All that a copy has: the question, choices that its prompt lists, or its right answer."""
    return item.prompt if item.prompt.count("\n") > 1 else f"{item.prompt} {item.choices[item.right] or item.answer}"


def words_in_a_row(item: Item) -> list[tuple[str, ...]]:
    words = re.findall(r"\w+", whole(item).lower())
    return list(zip(*(words[at:] for at in range(5)), strict=False))


def shares_text(item: Item, grams: set[tuple[str, ...]]) -> bool:
    own = words_in_a_row(item)
    return sum(gram in grams for gram in own) >= 0.5 * max(len(own), 1)


def rewrap(text: str, random: random.Random) -> str:
    return "\n".join(textwrap.wrap(text, random.randint(20, 90), initial_indent="  " * random.randint(0, 3)))


def recase(text: str, random: random.Random) -> str:
    return random.choice([str.upper, str.lower, str.title, str.swapcase])(text)


def repunctuate(text: str, random: random.Random) -> str:
    text = re.sub(r"[,;:]", lambda _: random.choice(["", " -", ","]), text)
    return re.sub(r" ", lambda _: random.choice([" ", "  ", "\t", "\u00a0"]), text).replace("'", "’").replace('"', "“")


def everything(text: str, random: random.Random) -> str:
    return recase(rewrap(repunctuate(text, random), random), random)


def to_html(text: str, random: random.Random) -> str:
    words = [f"<b>{word}</b>" if random.random() < 0.2 else word for word in html.escape(text).split(" ")]
    return '<div class="q"><p>' + "&nbsp;".join(words).replace("\n", "</p>\n<p>") + "</p></div>"


def to_full_width(text: str, random: random.Random) -> str:
    return text.translate({point: point + 0xFEE0 for point in range(0x21, 0x7F)})


def reorder(text: str, random: random.Random) -> str:
    """The choices that a prompt lists, in another order under the same letters."""
    head, *choices = re.split(r"(?m)^(?=[A-Z]\. )", text)
    last, _, tail = choices[-1].partition("\n") if choices else ("", "", "")
    bodies = [each.strip()[3:] for each in [*choices[:-1], last]]
    random.shuffle(bodies)
    return head + "".join(f"{letter}. {body}\n" for letter, body in zip("ABCDEFGH", bodies, strict=False)) + tail


DISGUISES: dict[str, Callable[[str, random.Random], str]] = {
    "as they are": lambda text, random: text,
    "re-wrapped": rewrap,
    "re-cased": recase,
    "other punctuation and spaces": repunctuate,
    "all of these": everything,
    "raw HTML": to_html,
    "letters of full width": to_full_width,
    "choices in another order": reorder,
}


def plant(text: list[str], copies: list[str]) -> list[Document]:
    """Each copy in the middle of a document, at any character."""
    order = random.Random(1)
    held: dict[int, list[str]] = {}
    for copy in copies:
        held.setdefault(order.randrange(len(text)), []).append(copy)
    documents = []
    for index, each in enumerate(text):
        for copy in held.get(index, []):
            at = order.randrange(len(each) + 1)
            each = f"{each[:at]}{copy}{each[at:]}"
        documents.append(Document(f"document {index}", each))
    return documents


def exact(items: list[Item], documents: list[Document]) -> float:
    """The share of items of which 13 words in a row stand in the text as they are."""
    wanted: dict[tuple[str, ...], int] = {}
    for index, item in enumerate(items):
        words = whole(item).split(" ")
        wanted |= {tuple(words[at : at + 13]): index for at in range(len(words) - 12)}
    found = set()
    for document in documents:
        words = document.text.split(" ")
        found |= {wanted[each] for each in zip(*(words[at:] for at in range(13)), strict=False) if each in wanted}
    return len(found) / len(items)


if __name__ == "__main__":
    main()
