"""Units that stand after or before a number: 5 cm, 5 square meters, 60 miles per hour, $5, 72 books.

A unit is a factor and powers of base units. Only known units and nouns count as such: "5 dozen" and "5 or 7" are not 5.
Factors are exact by definition (the international yard and pound of 1959, the US gallon of 231 cubic inches).
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from napkin.grading.mathematics.answer_tokens import Token

_INCH = Fraction("0.0254")
_POUND = Fraction("0.45359237")
_GALLON = 231 * _INCH**3
_LITRE = Fraction(1, 1000)


@dataclass(frozen=True)
class Unit:
    """A unit of measure."""

    factor: Fraction
    """The number of base units in it."""
    powers: tuple[tuple[str, int], ...]
    """Base units with their powers, in the order of their names; none for a percentage."""


def _named(base: str, table: dict[str, Fraction | int], power: int = 1) -> dict[str, tuple[Fraction, str, int]]:
    return {name: (Fraction(factor), base, power) for names, factor in table.items() for name in names.split()}


_UNITS: dict[str, tuple[Fraction, str, int]] = {
    **_named(
        "meter",
        {
            "m meter meters metre metres": 1,
            "mm millimeter millimeters millimetre millimetres": Fraction(1, 1000),
            "cm centimeter centimeters centimetre centimetres": Fraction(1, 100),
            "dm decimeter decimeters": Fraction(1, 10),
            "km kilometer kilometers kilometre kilometres": 1000,
            "in inch inches": _INCH,
            "ft foot feet": 12 * _INCH,
            "yd yard yards": 36 * _INCH,
            "mi mile miles": 63360 * _INCH,
        },
    ),
    **_named(
        "meter",
        {
            "ml mL milliliter milliliters millilitre millilitres": _LITRE / 1000,
            "l L liter liters litre litres": _LITRE,
            "gallon gallons gal": _GALLON,
            "quart quarts qt": _GALLON / 4,
            "pint pints pt": _GALLON / 8,
            "cup cups": _GALLON / 16,
        },
        3,
    ),
    **_named(
        "second",
        {
            "s sec secs second seconds": 1,
            "ms millisecond milliseconds": Fraction(1, 1000),
            "min mins minute minutes": 60,
            "h hr hrs hour hours": 3600,
            "day days": 86400,
            "week weeks": 7 * 86400,
        },
    ),
    **_named("month", {"month months": 1, "year years yr yrs": 12}),
    **_named(
        "kilogram",
        {
            "mg milligram milligrams": Fraction(1, 10**6),
            "g gram grams": Fraction(1, 1000),
            "kg kilogram kilograms kilo kilos": 1,
            "lb lbs pound pounds": _POUND,
            "oz ounce ounces": _POUND / 16,
        },
    ),
    **_named("ton", {"ton tons": 1}),
    **_named("dollar", {"dollar dollars USD usd $": 1, "cent cents ¢": Fraction(1, 100)}),
    **_named("euro", {"euro euros EUR €": 1}),
    **_named("degree", {"degree degrees °": 1}),
    **_named("radian", {"radian radians rad": 1}),
    **_named("newton", {"N newton newtons": 1}),
    **_named("joule", {"J joule joules": 1}),
    **_named("watt", {"W watt watts": 1, "kW": 1000}),
    **_named("volt", {"V volt volts": 1}),
    **_named("unit", {"unit units": 1}),
}
_PER_HOUR = {"mph": "miles", "kph": "km", "kmh": "km"}
_NOUNS = frozenset(
    """
    age animal apple bag ball balloon banana baseball basket bead bean bee bill bird block boat bone book bottle
    bowl box boy bracelet brick brother brownie bulb bus butterfly button cake calorie can candle candy car card
    carrot cat chair cherry chicken child chip chocolate class client coin container cookie cow cracker crayon
    cupcake customer deer digit dish dog doll donut dress duck edge egg element employee envelope episode eraser
    face fish floor flower friend frog fruit game gift girl glass goal goat grape group guest hat head horse hotdog
    house integer item jar jellybean job kid kitten lap leaf leg lemon letter light lily lion loaf lollipop man
    marble marker match meal member message mouse movie muffin mushroom nail necklace nickel notebook number nut
    orange outcome page painting pancake paper paperclip part passenger patient pea peach pear pen pencil penguin
    penny people person pet petal phone photo picture pie piece pig pill pillow pizza plant plate player point
    potato present prize problem puppy question rabbit room rose row sandwich scarf scoop seat seed serving sheep
    sheet shell shirt shoe side sister slice snack sock solution song spoon spot stamp star step stick sticker stone
    story strawberry student sweet table tablespoon task teacher team term text ticket tile time tire tomato toy
    train tree triangle trip truck turtle value vegetable vehicle vertex visitor vote way window word worker zebra
    """.split()
)
# Things that are counted, though not in the list: 12 widgets. Words that change the number are none.
_OTHER_PLURAL = re.compile(r"[a-z]{3,20}[a-rt-z]s|[a-z]{3,20}sses")
_NOT_THINGS = frozenset(
    """
    pairs halves thirds quarters fourths fifths sixths sevenths eighths ninths tenths hundredths thousandths hundreds
    thousands millions billions trillions dozens scores times plus minus less unless percents percentages negatives
    squares cubes powers factors digits multiples guesses maybes always perhaps besides versus whereas thus this does
    was has its his hers theirs ours yours radians degrees points bases grosses couples triples doubles
    percent twos threes fours fives sixes sevens eights nines tens
    """.split()
)
_IRREGULAR = {
    "children": "child", "men": "man", "leaves": "leaf", "loaves": "loaf", "vertices": "vertex", "mice": "mouse",
    "scarves": "scarf", "women": "woman",
    "pennies": "penny", "people": "person", "feet": "foot", "buses": "bus", "classes": "class",
    "glasses": "glass", "dresses": "dress",
}  # fmt: skip
_AREAS = {"square": 2, "sq": 2, "sq.": 2, "cubic": 3, "cu": 3}
_POWERS = {"squared": 2, "cubed": 3}
_IN_UNITS = ("^", "/", "{", "}", "2", "3")


def split_unit(tokens: list[Token], *, letters: bool = False) -> tuple[list[Token], Unit | None]:
    """The tokens of the number, and the unit after or before it if there is one.

    A single letter is a unit if it stands in \\text, or with `letters`."""
    if tokens and tokens[0] in (Token("mark", "\\$"), Token("words", "€")):
        return tokens[1:], unit_of([tokens[0].text.lstrip("\\")])
    if len(tokens) > 1 and tokens[0] == Token("mark", "-") and tokens[1] == Token("mark", "\\$"):
        return [tokens[0], *tokens[2:]], unit_of(["$"])
    if tokens and tokens[-1] == Token("mark", "\\$"):
        return tokens[:-1], unit_of(["$"])
    start = len(tokens)
    while start > 1 and (tokens[start - 1].kind in ("words", "name") or tokens[start - 1].text in _IN_UNITS):
        start -= 1
    # The longest end that is a unit.
    for first in range(start, len(tokens)):
        if not (tokens[first].kind == "words" or (tokens[first].kind == "name" and (letters or tokens[first].upright))):
            continue
        text = " ".join(token.text for token in tokens[first:])
        unit = unit_of(text.replace("/", " / ").replace("^", " ^ ").split())
        if unit is not None:
            return tokens[:first], unit
    return tokens, None


def unit_of(words: list[str]) -> Unit | None:
    """The unit that some words name; None if they name none."""
    factor, powers = Fraction(1), dict[str, int]()
    sign, before, last = 1, 1, None
    words = [word for word in words if word not in ("{", "}")]
    if words in (["percent"], ["per", "cent"]):
        return Unit(Fraction(1, 100), ())
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        power: int | None = None
        if word in ("per", "/") and last is not None and sign == 1:
            sign, last = -1, None
            continue
        if word == "^" and last is not None and position < len(words) and words[position] in ("2", "3"):
            power = int(words[position])
            position += 1
        elif word in _POWERS and last is not None:
            power = _POWERS[word]
        if power is not None and last is not None:
            # The unit counts once already.
            name, each, base_power = last
            factor *= each ** (sign * (power - 1))
            powers[name] = powers.get(name, 0) + sign * base_power * (power - 1)
            last = None
            continue
        if word in _AREAS and before == 1:
            before = _AREAS[word]
            continue
        known = _known(word)
        if known is None:
            return None
        each, name, base_power = known
        factor *= each ** (sign * before)
        powers[name] = powers.get(name, 0) + sign * before * base_power
        if word in _PER_HOUR:
            factor, powers["second"] = factor / 3600, powers.get("second", 0) - 1
        last, before = (name, each, base_power), 1
    if not powers or before != 1 or (last is None and sign == -1 and words[-1] in ("per", "/")):
        return None
    return Unit(factor, tuple(sorted((name, power) for name, power in powers.items() if power)))


def changes_numbers(word: str) -> bool:
    """True if the word behind a number makes it another one: 5 km or 5 million, but not 5 books."""
    lower = word.lower()
    is_unit = word != "in" and (word in _UNITS or (len(word) > 2 and lower in _UNITS) or lower in _PER_HOUR)
    return is_unit or lower in _NOT_THINGS or lower.rstrip("s") + "s" in _NOT_THINGS


def _known(word: str) -> tuple[Fraction, str, int] | None:
    word = word.strip(".") or word
    word = _PER_HOUR.get(word, word)
    known = _UNITS.get(word) or _UNITS.get(word.lower() if len(word) > 2 else word)
    if known is not None:
        return known
    noun = word.lower()
    noun = _IRREGULAR.get(noun, noun)
    candidates = [noun, noun.removesuffix("s"), noun.removesuffix("es")]
    if noun.endswith("ies"):
        candidates.append(noun[:-3] + "y")
    singular = next((each for each in candidates if each in _NOUNS), None)
    if singular is None and _OTHER_PLURAL.fullmatch(word) and word not in _NOT_THINGS:
        singular = word
    return None if singular is None else (Fraction(1), singular, 1)
