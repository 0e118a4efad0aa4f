"""Instructions that a program can verify, as in IFEval (Zhou et al. 2023): how long an answer is, which words it has,
how it is laid out.

A prompt has one or more of 25 kinds, each named by its published identifier with its parameters. Strictly, an answer
follows an instruction if the check passes on the text as it is. Loosely, it does if the check passes on any of eight
variants: without its first line, its last line, or both, each as it is and without asterisks, so that an introduction,
a closing sentence or markup of Markdown is forgiven.

Words are runs of letters, digits and underscores; sentences end where a mark is followed by white space, abbreviations
aside; languages are those of `napkin.languages`. The published checks take these from other libraries, so that single
answers at the boundary of a length may be judged otherwise.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from napkin.errors import NapkinError

_ABBREVIATIONS = frozenset(
    "dr mr mrs ms prof sr jr st vs etc eg ie e.g i.e u.s u.k p.s p.p.s inc ltd co no vol fig al approx".split()
)
_SENTENCE_END = re.compile(r"[.!?…。！？]+[\"'”’)\]]*(?=\s|$)|[。！？]")
_WORD = re.compile(r"\w+")
_CAPITAL_WORD = re.compile(r"\w+(?:['’.-]\w+)*")
_CHOICES = ("my answer is yes.", "my answer is no.", "my answer is maybe.")
_SECTIONS_OF_STARS = re.compile(r"\s?\*\*\*\s?")
_MOST_PATTERN = 1000

Parameters = Mapping[str, Any]
Check = Callable[[str, Parameters], bool]


def instructions_followed(answer: str, reference: str) -> tuple[list[bool], list[bool]]:
    """Which instructions of a reference an answer follows strictly, and which loosely, in their order.

    `reference` is JSON, a list of [identifier, parameters]. Raises NapkinError for one that is not.
    """
    asked = read_instructions(reference)
    variants = [each for each in _variants(answer) if each.strip()]
    strict = [bool(answer.strip()) and CHECKS[name](answer, parameters) for name, parameters in asked]
    loose = [any(CHECKS[name](each, parameters) for each in variants) for name, parameters in asked]
    return strict, loose


def read_instructions(reference: str) -> list[tuple[str, dict[str, Any]]]:
    """The instructions of a reference. Raises NapkinError for an unknown one, and for parameters that are missing or of
    another type."""
    try:
        listed = json.loads(reference)
    except (ValueError, RecursionError):
        listed = None
    if not isinstance(listed, list) or not listed:
        raise NapkinError("the instructions are not a list of [identifier, parameters]: correct them")
    instructions = []
    for each in listed:
        name, arguments = each if isinstance(each, list) and len(each) == 2 else (None, None)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise NapkinError("an instruction is not [identifier, parameters]: correct it")
        if name not in CHECKS:
            raise NapkinError(f"there is no instruction {name[:60]!r}: use one of IFEval's 25")
        parameters = {key: value for key, value in arguments.items() if value is not None}
        for key, kind in PARAMETERS[name].items():
            value = parameters.get(key)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise NapkinError(f"{name} needs {key} ({kind.__name__}), and has {str(value)[:40]!r}: correct it")
            texts = value if isinstance(value, list) else [value]
            if any(not isinstance(text, str | int) or len(str(text)) > _MOST_PATTERN for text in texts):
                raise NapkinError(f"{name} has {key} that is not text of up to {_MOST_PATTERN} characters: correct it")
        relation = next((value for key, value in parameters.items() if key.endswith("relation")), "at least")
        if relation not in ("at least", "less than"):
            raise NapkinError(f"{name} has the relation {str(relation)[:40]!r}: use 'at least' or 'less than'")
        instructions.append((name, parameters))
    return instructions


def _variants(answer: str) -> list[str]:
    lines = answer.split("\n")
    texts = [answer, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [variant for text in texts for variant in (text, text.replace("*", ""))]


def _compared(count: int, parameters: Parameters, number: str, relation: str = "relation") -> bool:
    """True if a count is at least, or less than, what the parameters ask for."""
    wanted = parameters[number]
    return count < wanted if parameters.get(relation) == "less than" else count >= wanted


def _occurrences(text: str, phrase: str) -> int:
    """How often a phrase stands in a text, whatever its case, also within words."""
    return text.lower().count(phrase.lower())


def _has_word(text: str, word: str) -> bool:
    # A boundary only where the word begins or ends with one of its characters.
    before, after = (r"\b" if word and _WORD.match(end) else "" for end in (word[:1], word[-1:]))
    return re.search(f"{before}{re.escape(word)}{after}", text, re.IGNORECASE) is not None


def sentences(text: str) -> int:
    """The number of sentences: marks that end one, and text after the last of them."""
    count, start = 0, 0
    for end in _SENTENCE_END.finditer(text):
        last = text[start : end.start()].split()
        word = last[-1].strip("\"'(“[").lower() if last else ""
        # The full stop of an abbreviation does not end a sentence, unless nothing follows.
        if (
            end.group() == "."
            and (word in _ABBREVIATIONS or re.fullmatch(r"[a-z]|\d{1,2}", word))
            and text[end.end() :].strip()
        ):
            continue
        if any(map(str.isalnum, text[start : end.start()])):
            count, start = count + 1, end.end()
    return count + any(map(str.isalnum, text[start:]))


def _paragraphs_between_stars(text: str, parameters: Parameters) -> bool:
    parts = _SECTIONS_OF_STARS.split(text)
    inner = parts[1:-1]
    # An empty part before the first mark or after the last is not a paragraph; one between two marks is a mistake.
    if any(not part.strip() for part in inner):
        return False
    return sum(bool(part.strip()) for part in parts) == parameters["num_paragraphs"]


def _first_word_of_paragraph(text: str, parameters: Parameters) -> bool:
    parts = text.split("\n\n")
    number, filled = parameters["nth_paragraph"], sum(bool(part.strip()) for part in parts)
    if not 1 <= number <= min(filled, len(parts)) or filled != parameters["num_paragraphs"]:
        return False
    words = parts[number - 1].split()
    first = re.split(r"[.,?!'\"]", words[0].lstrip("'\""), maxsplit=1)[0] if words else ""
    return first.lower() == parameters["first_word"].lower()


def _postscript(text: str, parameters: Parameters) -> bool:
    marker: str = parameters["postscript_marker"].lower()
    # The usual markers may have spaces between their letters.
    spelled = {"p.s.": r"p\.\s?s\.", "p.p.s": r"p\.\s?p\.\s?s"}.get(marker, re.escape(marker))
    return re.search(spelled, text.lower()) is not None


def _bullets(text: str) -> int:
    return len(re.findall(r"^\s*(?:\*[^*]|-)", text, re.MULTILINE))


def _highlights(text: str) -> int:
    """Sections between one asterisk, or two, on one line."""
    double = re.findall(r"\*\*([^\n*]*)\*\*", text)
    single = re.findall(r"\*([^\n*]*)\*", text)
    return sum(bool(part.strip()) for part in [*double, *single])


def _sections(text: str, parameters: Parameters) -> bool:
    mark = re.escape(parameters["section_spliter"])
    return len(re.findall(rf"{mark}\s?\d+", text)) >= parameters["num_sections"]


def _is_json(text: str) -> bool:
    inner = re.sub(r"^\s*```(?:json)?", "", text, flags=re.IGNORECASE)
    try:
        json.loads(re.sub(r"```\s*$", "", inner).strip())
    except (ValueError, RecursionError):
        return False
    return True


def _has_title(text: str) -> bool:
    return any(part.strip("<> ") for part in re.findall(r"<<([^\n]+?)>>", text))


def _two_responses(text: str) -> bool:
    parts = text.split("******")
    filled = [part.strip() for part in parts if part.strip()]
    return all(part.strip() for part in parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


def _ends_with(text: str, parameters: Parameters) -> bool:
    return text.strip().strip('"').lower().endswith(parameters["end_phrase"].strip().lower())


def _is_quoted(text: str) -> bool:
    inner = text.strip()
    return len(inner) > 1 and inner[0] == inner[-1] == '"'


def _is_in(text: str, language: str) -> bool:
    if not any(map(str.isalpha, text)):
        # The language of such a text cannot be determined: it passes.
        return True
    # The classifier brings numba along, which takes half a second.
    from napkin.languages import identify_language

    return identify_language(text, least=0.0).language == language.partition("-")[0].lower()


def _capital_words(text: str) -> int:
    return sum(word.isupper() for word in _CAPITAL_WORD.findall(text))


CHECKS: dict[str, Check] = {
    "keywords:existence": lambda text, p: all(_occurrences(text, word) for word in p["keywords"]),
    "keywords:frequency": lambda text, p: _compared(_occurrences(text, p["keyword"]), p, "frequency"),
    "keywords:forbidden_words": lambda text, p: not any(_has_word(text, word) for word in p["forbidden_words"]),
    "keywords:letter_frequency": lambda text, p: _compared(
        _occurrences(text, p["letter"]), p, "let_frequency", "let_relation"
    ),
    "language:response_language": lambda text, p: _is_in(text, p["language"]),
    "length_constraints:number_sentences": lambda text, p: _compared(sentences(text), p, "num_sentences"),
    "length_constraints:number_paragraphs": _paragraphs_between_stars,
    "length_constraints:number_words": lambda text, p: _compared(len(_WORD.findall(text)), p, "num_words"),
    "length_constraints:nth_paragraph_first_word": _first_word_of_paragraph,
    "detectable_content:number_placeholders": lambda text, p: (
        len(re.findall(r"\[[^\n\]]*\]", text)) >= p["num_placeholders"]
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda text, p: _bullets(text) == p["num_bullets"],
    "detectable_format:constrained_response": lambda text, p: any(each in text.lower() for each in _CHOICES),
    "detectable_format:number_highlighted_sections": lambda text, p: _highlights(text) >= p["num_highlights"],
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": lambda text, p: _is_json(text),
    "detectable_format:title": lambda text, p: _has_title(text),
    "combination:two_responses": lambda text, p: _two_responses(text),
    "combination:repeat_prompt": lambda text, p: text.strip().lower().startswith(p["prompt_to_repeat"].strip().lower()),
    "startend:end_checker": _ends_with,
    "change_case:capital_word_frequency": lambda text, p: _compared(
        _capital_words(text), p, "capital_frequency", "capital_relation"
    ),
    "change_case:english_capital": lambda text, p: text.isupper() and _is_in(text.lower(), "en"),
    "change_case:english_lowercase": lambda text, p: text.islower() and _is_in(text, "en"),
    "punctuation:no_comma": lambda text, p: "," not in text,
    "startend:quotation": lambda text, p: _is_quoted(text),
}
"""The check of each kind of instruction, by its published identifier."""

PARAMETERS: dict[str, dict[str, type]] = {name: {} for name in CHECKS} | {
    "keywords:existence": {"keywords": list},
    "keywords:frequency": {"keyword": str, "frequency": int},
    "keywords:forbidden_words": {"forbidden_words": list},
    "keywords:letter_frequency": {"letter": str, "let_frequency": int},
    "language:response_language": {"language": str},
    "length_constraints:number_sentences": {"num_sentences": int},
    "length_constraints:number_paragraphs": {"num_paragraphs": int},
    "length_constraints:number_words": {"num_words": int},
    "length_constraints:nth_paragraph_first_word": {"num_paragraphs": int, "nth_paragraph": int, "first_word": str},
    "detectable_content:number_placeholders": {"num_placeholders": int},
    "detectable_content:postscript": {"postscript_marker": str},
    "detectable_format:number_bullet_lists": {"num_bullets": int},
    "detectable_format:number_highlighted_sections": {"num_highlights": int},
    "detectable_format:multiple_sections": {"section_spliter": str, "num_sections": int},
    "combination:repeat_prompt": {"prompt_to_repeat": str},
    "startend:end_checker": {"end_phrase": str},
    "change_case:capital_word_frequency": {"capital_frequency": int},
}
"""The parameters that each kind needs; a relation, where there is one, is 'at least' or 'less than'."""
