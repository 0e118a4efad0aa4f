"""The grader of mathematical answers."""

import re

from napkin.alignment.rewards.mathematics.answer_tokens import MOST_CHARACTERS, Token, tokens_of
from napkin.alignment.rewards.mathematics.equality import Comparison
from napkin.alignment.rewards.mathematics.expression import (
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
from napkin.alignment.rewards.mathematics.expression_parser import parse_tokens
from napkin.alignment.rewards.mathematics.final_answer import bare, final_answer
from napkin.alignment.rewards.mathematics.forms import scaled
from napkin.alignment.rewards.mathematics.number_words import NUMBER_WORDS
from napkin.alignment.rewards.mathematics.plain_words import plain_words
from napkin.alignment.rewards.mathematics.units import Unit, split_unit
from napkin.errors import NapkinError


def math_reward(answer: str, reference: str) -> float:
    r"""1 if the final answer of a text is the reference, 0 otherwise.

    >>> math_reward(r"so we get \boxed{\frac{1}{2}}", "0.5"), math_reward("5 or 7", "7")
    (1.0, 0.0)
    """
    found, wanted = final_answer(answer), reference_answer(reference)
    return float(found is not None and answers_equal(found, wanted))


def number_reward(answer: str, reference: str) -> float:
    """1 if the final answer of a text is the number of the reference, with its unit if both have one."""
    found, wanted = final_answer(answer), reference_answer(reference)
    return float(found is not None and answers_equal(found, wanted, only_numbers=True))


def reference_answer(reference: str) -> str:
    """What is right, of a reference that may be a whole solution."""
    if "\\boxed" in reference or "\\fbox" in reference or "####" in reference:
        return final_answer(reference) or ""
    return bare(reference)


def check_math_reference(reference: str) -> None:
    """Raises NapkinError for a reference that is empty, or too long to be compared."""
    wanted = reference_answer(reference)
    if not wanted:
        raise NapkinError("the reference has no answer: give what is right")
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
    r"""Whether two answers, in LaTeX or plain, say the same; False where that cannot be known in bounded work.

    >>> answers_equal(r"2\sqrt{2}", "sqrt(8)"), answers_equal("(1, 2)", "(1, 2]"), answers_equal("9^9^9^9", "1")
    (True, False, False)
    """
    if len(answer) > MOST_CHARACTERS or len(reference) > MOST_CHARACTERS or not reference.strip():
        return False
    if not only_numbers and _squeezed(answer) == _squeezed(reference):
        return True
    if not only_numbers and _is_text(answer) and _is_text(reference) and _plain(answer) == _plain(reference):
        return True
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
    tokens, unit = split_unit(_with_number_words(tokens_of(_with_money(text))), letters=letters)
    node = parse_tokens(tokens)
    # Angles are numbers: those in radians.
    if unit is not None and unit.powers in ((("degree", 1),), (("radian", 1),)):
        return Call(f"{unit.powers[0][0]}s", (node,)), None
    return node, unit


def _with_money(text: str) -> str:
    """A single $ is money: those around mathematics have been taken away."""
    return text.replace("$", "\\$") if text.count("$") == 1 and "\\$" not in text else text


def _with_number_words(tokens: list[Token]) -> list[Token]:
    """A number in words, if it is the whole answer or its unit follows."""
    if tokens and tokens[0].kind == "words" and tokens[0].text.lower() in NUMBER_WORDS:
        return [Token("number", str(NUMBER_WORDS[tokens[0].text.lower()])), *tokens[1:]]
    return tokens


def _in_one_unit(node: Node, unit: Unit | None, wanted: Node, wanted_unit: Unit | None) -> tuple[Node, Node]:
    """Both numbers in one unit; a unit that only one of them has is not compared, but a percentage is a number."""
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
    return len(plain) > 1 and plain.replace(" ", "").replace("-", "").replace("'", "").isalpha()


def _squeezed(text: str) -> str:
    """Without white space, but that between two letters or digits."""
    return re.sub(r"\s+(?![a-zA-Z0-9])|(?<![a-zA-Z0-9])\s+", "", " ".join(text.split()))


def _plain(text: str) -> str:
    for command in ("\\text", "\\textbf", "\\mathrm", "\\textrm", "\\mbox"):
        text = text.replace(command + "{", "{")
    return plain_words(text.replace("{", " ").replace("}", " "))
