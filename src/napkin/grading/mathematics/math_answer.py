"""The grader of mathematical answers."""

import re
from fractions import Fraction

from napkin.errors import NapkinError
from napkin.grading.answers import names_a_choice, split_label
from napkin.grading.mathematics.answer_tokens import MOST_CHARACTERS, tokens_of
from napkin.grading.mathematics.equality import Comparison, plain_words, scaled, set_in_words
from napkin.grading.mathematics.expression import (
    Call,
    Collection,
    Node,
    NotUnderstood,
    Number,
    Relation,
    Symbol,
    Words,
    variables_of,
)
from napkin.grading.mathematics.expression_parser import parse_tokens
from napkin.grading.mathematics.final_answer import bare, final_answer, final_number, with_number_words
from napkin.grading.mathematics.units import Unit, split_unit

# \{x \mid x > 3\} is what it says of x.
_BUILDER = re.compile(
    r"\\(?:left\s*\\)?\{\s*[a-zA-Z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid(?![a-zA-Z])|\\?:|\|)(.*?)\\(?:right\s*\\)?\}",
    re.DOTALL,
)


def math_score(answer: str, reference: str) -> float:
    r"""1 if the final answer of a text is the reference, 0 otherwise.

    >>> math_score(r"so we get \boxed{\frac{1}{2}}", "0.5"), math_score("5 or 7", "7")
    (1.0, 0.0)
    """
    given, wanted = final_answer(answer), reference_answer(reference)
    return float(given is not None and answers_equal(given, wanted))


def number_score(answer: str, reference: str) -> float:
    """1 if the final answer of a text is the number of the reference, with its unit if both have one; see
    `final_number` for texts that mark none."""
    given, wanted = final_number(answer), reference_answer(reference)
    return float(given is not None and answers_equal(given, wanted, only_numbers=True))


def reference_answer(reference: str) -> str:
    """The answer in a reference, which may be a whole solution."""
    if "\\boxed" in reference or "\\fbox" in reference or "####" in reference:
        return final_answer(reference) or ""
    return bare(reference)


def check_math_reference(reference: str) -> None:
    """Raises NapkinError for a reference that is empty, or too long to be compared."""
    wanted = reference_answer(reference)
    if not wanted:
        raise NapkinError("the reference has no answer: give the right one")
    if len(wanted) > MOST_CHARACTERS:
        raise NapkinError(f"the reference has {len(wanted)} characters: use at most {MOST_CHARACTERS}")


def check_number_reference(reference: str) -> None:
    """Raises NapkinError for a reference that is not a number."""
    check_math_reference(reference)
    try:
        node, _ = _read(reference_answer(reference))
        if not _is_plain_number(node):
            raise NotUnderstood("it is an expression")
    except NotUnderstood as error:
        raise NapkinError(f"the reference {reference[:40]!r} is not a number ({error}): use the reward math") from None


def answers_equal(answer: str, reference: str, *, only_numbers: bool = False) -> bool:
    r"""True where two answers, in LaTeX or plain, are equal; False where that cannot be known in bounded work.

    >>> answers_equal(r"2\sqrt{2}", "sqrt(8)"), answers_equal("(1, 2)", "(1, 2]"), answers_equal("9^9^9^9", "1")
    (True, False, False)
    """
    if len(answer) > MOST_CHARACTERS or len(reference) > MOST_CHARACTERS or not reference.strip():
        return False
    if _equal(answer, reference, only_numbers=only_numbers):
        return True
    return _same_choices(answer, reference, only_numbers=only_numbers)


def _equal(answer: str, reference: str, *, only_numbers: bool) -> bool:
    if not only_numbers and _squeezed(answer) == _squeezed(reference):
        return True
    if not only_numbers and _is_text(answer) and _is_text(reference) and _plain(answer) == _plain(reference):
        return True
    return _same(answer, reference, only_numbers=only_numbers)


def _same_choices(answer: str, reference: str, *, only_numbers: bool) -> bool:
    """Compare (C) 12 with (C), C, 12 or (C) 12: by the letters, where both have one, and the texts."""
    (letter, text), (wanted, wanted_text) = (split_label(each) or (None, each) for each in (answer, reference))
    if letter and wanted and letter != wanted:
        return False
    if not (letter and text) and not (wanted and wanted_text):
        return False
    if letter and wanted and not (text and wanted_text):
        return not only_numbers and not names_a_choice(text) and not names_a_choice(wanted_text)
    return bool(text and wanted_text) and _equal(text, wanted_text, only_numbers=only_numbers)


def _same(answer: str, reference: str, *, only_numbers: bool) -> bool:
    try:
        (node, unit), (wanted, wanted_unit) = _read(answer), _read(reference)
        if only_numbers and not (_is_plain_number(node) and _is_plain_number(wanted)):
            return False
        # 5 m is a product of variables, unless the other has a unit.
        if unit is None and wanted_unit is not None and wanted_unit.powers:
            node, unit = _read(answer, letters=True)
        elif wanted_unit is None and unit is not None and unit.powers:
            wanted, wanted_unit = _read(reference, letters=True)
        node, wanted = _in_one_unit(node, unit, wanted, wanted_unit)
        return Comparison(f"{answer}\0{reference}").same(node, wanted)
    except (NotUnderstood, RecursionError):
        return False


def _read(text: str, *, letters: bool = False) -> tuple[Node, Unit | None]:
    if (named := set_in_words(_plain(text))) is not None:
        return named, None
    builder = _BUILDER.fullmatch(text.strip())
    text = _exact_side(builder[1] if builder else text)
    tokens, unit = split_unit(with_number_words(tokens_of(_with_money(text))), letters=letters)
    node = parse_tokens(tokens)
    # Angles are numbers: those in radians.
    if unit is not None and unit.powers in ((("degree", 1),), (("radian", 1),)):
        return Call(f"{unit.powers[0][0]}s", (node,)), None
    return node, unit


def _with_money(text: str) -> str:
    r"""A single $ is money; in pairs around mathematics they are left out, as \( and \) are."""
    text = re.sub(r"\\[()]", " ", text)
    text = re.sub(r"(?<!\\)\$(?=\S)([^$]*[^$\s\\])\$", r" \1 ", text)
    return text.replace("$", "\\$") if text.count("$") == 1 and "\\$" not in text else text


def _exact_side(text: str) -> str:
    r"""2\sqrt3 of 2\sqrt3 \approx 3.46: the number that is rounded, where the other side is what it rounds to."""
    sides = re.split(r"\\approx(?![a-zA-Z])|≈", text)
    if len(sides) != 2:
        return text
    exact, rounded = sides[0].strip(), sides[1].strip(" $")
    match = re.fullmatch(r"-?[0-9]*\.?([0-9]*)", rounded)
    if match is None or not exact or not rounded.strip("-."):
        return text
    node, unit = _read(exact)
    if unit is not None or not Comparison(text).rounds_to(node, Fraction(rounded), len(match[1])):
        raise NotUnderstood("it says that different numbers are nearly equal")
    return exact


def _in_one_unit(node: Node, unit: Unit | None, wanted: Node, wanted_unit: Unit | None) -> tuple[Node, Node]:
    """Both numbers converted to one unit; a unit that only one of them has is ignored, except that a percentage is a
    number."""
    if unit is not None and not unit.powers:
        node, unit = scaled(node, unit.factor), None
    if wanted_unit is not None and not wanted_unit.powers:
        wanted, wanted_unit = scaled(wanted, wanted_unit.factor), None
    if unit is None or wanted_unit is None or unit == wanted_unit:
        return node, wanted
    if unit.powers != wanted_unit.powers:
        raise NotUnderstood("the units measure different things")
    return scaled(node, unit.factor), scaled(wanted, wanted_unit.factor)


def _is_plain_number(node: Node) -> bool:
    if isinstance(node, Relation) and set(node.relations) == {"="} and isinstance(node.sides[0], Symbol):
        return len(node.sides) == 2 and _is_plain_number(node.sides[1])
    return not isinstance(node, Collection | Relation | Words) and not variables_of(node) and not _has_pi(node)


def _has_pi(node: Node) -> bool:
    if isinstance(node, Call):
        return any(map(_has_pi, node.arguments))
    return not isinstance(node, Number)


def _is_text(text: str) -> bool:
    plain = _plain(text)
    is_date = re.search(r"[A-Za-z]{3}", plain) is not None and plain.replace(" ", "").replace(",", "").isalnum()
    return is_date or (len(plain) > 1 and plain.replace(" ", "").replace("-", "").replace("'", "").isalpha())


def _squeezed(text: str) -> str:
    """Remove white space, except between two letters or digits."""
    return re.sub(r"\s+(?![a-zA-Z0-9])|(?<![a-zA-Z0-9])\s+", "", " ".join(text.split()))


def _plain(text: str) -> str:
    for command in ("\\text", "\\textbf", "\\mathrm", "\\textrm", "\\mbox"):
        text = text.replace(command + "{", "{")
    return plain_words(text.replace("{", " ").replace("}", " "))
