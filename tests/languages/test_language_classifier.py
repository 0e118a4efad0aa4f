"""The classifier that comes with the package, and the compiled n-grams beside the plain ones."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napkin.errors import NapkinError
from napkin.languages import LanguageClassifier, identify_language, identify_languages, load_classifier
from napkin.languages.classifier import packaged_classifier

SENTENCES = {
    "en": ["The old bridge was closed after the storm.", "She had never tasted anything so sweet before."],
    "de": ["Gestern haben wir am See gebadet und gegrillt.", "Der Zug nach Hamburg hat wieder Verspätung."],
    "fr": ["Le boulanger ouvre sa boutique à six heures.", "Nous avons oublié nos parapluies dans la voiture."],
    "es": ["Mañana iremos a visitar a los abuelos en el pueblo.", "El gato duerme debajo de la mesa de la cocina."],
    "it": ["Domani mattina andremo al mercato con la nonna.", "Il cane dei vicini abbaia tutta la notte."],
    "pt": ["Ontem choveu muito e as ruas ficaram cheias de água.", "A minha irmã não gosta de café com leite."],
    "nl": ["De kinderen spelen elke middag buiten in de tuin.", "Wij hebben gisteren een nieuwe fiets gekocht."],
    "sv": ["Vi åkte till stugan och plockade blåbär hela dagen.", "Han glömde sina nycklar på jobbet igår."],
    "pl": ["Wczoraj wieczorem padał śnieg i było bardzo zimno.", "Moja babcia piecze najlepsze ciasto ze śliwkami."],
    "cs": ["Včera jsme šli na dlouhou procházku kolem řeky.", "Můj bratr pracuje v nemocnici jako lékař."],
    "hu": ["A kutya egész éjjel ugatott a szomszéd kertjében.", "Holnap reggel korán kell felkelnem."],
    "fi": ["Kesällä uimme järvessä joka ilta saunan jälkeen.", "Hän ei muistanut ottaa sateenvarjoa mukaan."],
    "tr": ["Dün akşam arkadaşlarımla birlikte yemek yedik.", "Bu kitabı okumayı henüz bitirmedim."],
    "ru": ["Вчера мы долго гуляли по берегу реки.", "Моя сестра учится в университете на врача."],
    "uk": ["Учора ввечері ми довго гуляли біля річки.", "Моя бабуся пече найсмачніші пиріжки з вишнями."],
    "el": ["Χθες το βράδυ φάγαμε ψάρι δίπλα στη θάλασσα.", "Η αδελφή μου δουλεύει σε ένα μεγάλο νοσοκομείο."],
    "ar": ["ذهبنا أمس إلى السوق واشترينا الخبز والفواكه.", "أختي تدرس الطب في الجامعة منذ ثلاث سنوات."],
    "he": ["אתמול הלכנו לטייל לאורך חוף הים.", "אחותי לומדת רפואה באוניברסיטה."],
    "hi": ["कल हम बाज़ार से ताज़ी सब्ज़ियाँ लाए थे।", "मेरी बहन अस्पताल में काम करती है।"],
    "ja": ["昨日は友達と一緒に川のそばを散歩しました。", "祖母が作るケーキはとてもおいしいです。"],
    "ko": ["어제 저녁에 친구들과 함께 밥을 먹었어요.", "우리 할머니는 시골에서 혼자 사십니다."],
    "zh": ["昨天晚上我们在河边散步了很久。", "我的姐姐在一家大医院工作。"],
    "th": ["เมื่อวานเราไปเดินเล่นริมแม่น้ำกับเพื่อน", "ยายของฉันทำขนมอร่อยมาก"],
    "vi": ["Hôm qua chúng tôi đi dạo dọc bờ sông rất lâu.", "Chị gái tôi làm việc ở một bệnh viện lớn."],
}
TEXTS = st.text(st.sampled_from("abcÄßéİ ǅя中ก้ \n0_-'😀\u0301\u200d\U0001e900"), max_size=300)


@pytest.mark.parametrize("language", SENTENCES)
def test_plain_sentences_of_daily_life_are_told_apart(language: str) -> None:
    assert [guess.language for guess in identify_languages(SENTENCES[language])] == [language] * 2


@pytest.mark.parametrize(
    "text",
    ["", " \n\t", "12 + 30 = 42; 7,5 %", "😀😀 → ★ 👩‍👩‍👧", "\x00\x01", "2026-01-31T12:00:00Z 192.168.0.1"],
)
def test_text_without_language_is_unknown(text: str) -> None:
    assert identify_language(text).language == "unknown"


def test_code_is_unknown() -> None:
    code = "for (int i = 0; i < n; ++i) { buf[i] = tmp->ptr + idx * sizeof(*buf); if (!buf[i]) return NULL; }"
    assert identify_language(code).language == "unknown"


LISTED = """   bfrd xqlt mnpv 7f3a kzrt -mxgt -mpxrq=ev56 wdkl
  -mlnkrlx -mfprx -mgprs grvbdct lpkw tksz = 0x7f ffdc
"""
PROSE = """The size of the table is chosen so that the program ends sooner, but it needs more memory for that.
Without this option, a number is used that has turned out to be right for most of the input files.
"""


@pytest.mark.parametrize(("listed", "language"), [(40, "en"), (80, "unknown"), (200, "unknown")])
def test_a_page_is_in_the_language_of_its_prose_if_half_of_it_is_prose(listed: int, language: str) -> None:
    """As a whole each of them looks like code: 52%, 35% and 18% of their letters are of the prose."""
    for text in (PROSE * 20 + LISTED * listed, LISTED * listed + PROSE * 20):
        assert next(iter(packaged_classifier().probabilities(text))) == "zxx"
        assert identify_language(text).language == language


def test_of_prose_among_code_the_probability_is_that_of_the_prose() -> None:
    classifier = packaged_classifier()
    text = (LISTED * 8 + PROSE * 4) * 5
    start, pieces = 0, []
    while start < len(text):
        end = text.find("\n", start + 200) + 1 or len(text)
        pieces.append(text[start:end])
        start = end
    prose = "".join(each for each in pieces if next(iter(classifier.probabilities(each))) != "zxx")
    assert len(prose) < len(text)
    guess, expected = classifier.among(["en", "nl", "zxx"]).identify(text), classifier.among(["en", "nl", "zxx"])
    assert guess.language == "en"
    assert guess.probability == pytest.approx(expected.probabilities(prose)["en"], rel=1e-4)


def test_a_megabyte_of_one_letter_and_hostile_code_points_give_a_guess() -> None:
    for text in ("a" * 2**20, "\u0301" * 2**16, "中" * 2**16, "\ud800x\udfff" * 100, "\U0010ffff" * 100):
        assert 0 <= identify_language(text).probability <= 1


@given(TEXTS)
@settings(max_examples=75)
def test_compiled_sums_equal_the_plain_ones(text: str) -> None:
    classifier = packaged_classifier()
    n_plain, plain = classifier.plain_sum_of_rows(text)
    n, sums = classifier.sum_of_rows(text)
    assert n == n_plain
    np.testing.assert_array_equal(sums, plain)


def test_compiled_sums_equal_the_plain_ones_over_several_rooms_of_rows() -> None:
    text = "Unaufhörlich " * 300 + "字" * 5000 + " x" * 5000 + "y" * 64 + "z" * 65
    n_plain, plain = packaged_classifier().plain_sum_of_rows(text)
    n, sums = packaged_classifier().sum_of_rows(text)
    assert n == n_plain > 3 * 4096
    np.testing.assert_array_equal(sums, plain)


def test_logits_are_those_of_the_formula() -> None:
    classifier = packaged_classifier()
    text = SENTENCES["cs"][0]
    n, sums = classifier.plain_sum_of_rows(text)
    weights = classifier.outputs.astype(float)
    first, second = classifier.sharpness
    expected = (weights[:, :-1] @ (sums / n) + weights[:, -1]) * np.exp(first + second * np.log(n))
    logits = classifier.logits(text)
    assert logits is not None
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_copy_in_another_process_would_guess_the_same() -> None:
    classifier = copy.deepcopy(packaged_classifier())
    assert classifier._places != packaged_classifier()._places
    assert classifier.probabilities("Han glömde") == packaged_classifier().probabilities("Han glömde")


def test_probabilities_sum_to_one_and_begin_with_the_guess() -> None:
    text = SENTENCES["sv"][0]
    probabilities = packaged_classifier().probabilities(text)
    assert sum(probabilities.values()) == pytest.approx(1, abs=1e-5)
    assert list(probabilities.values()) == sorted(probabilities.values(), reverse=True)
    guess = identify_language(text)
    assert next(iter(probabilities)) == guess.language
    assert probabilities[guess.language] == pytest.approx(guess.probability, rel=1e-5)


def test_composed_and_decomposed_and_capital_letters_are_the_same() -> None:
    classifier = packaged_classifier()
    n, sums = classifier.sum_of_rows("Élan à Zürich")
    other_n, other = classifier.sum_of_rows("E\u0301LAN A\u0300 ZU\u0308RICH")
    assert n == other_n
    np.testing.assert_array_equal(sums, other)


def test_less_probable_than_asked_is_unknown() -> None:
    assert identify_language("The old bridge", least=1.0).language == "unknown"
    assert identify_language("The old bridge", least=0.0).language == "en"


def test_among_gives_the_same_odds_of_the_languages_left() -> None:
    classifier, text = packaged_classifier(), "Han glömde sina nycklar"
    every, some = classifier.probabilities(text), classifier.among(["da", "sv"]).probabilities(text)
    assert set(some) == {"da", "sv"}
    assert some["da"] / some["sv"] == pytest.approx(every["da"] / every["sv"], rel=1e-3)
    with pytest.raises(NapkinError, match="'tlh' is not known"):
        classifier.among(["tlh"])


def test_the_package_knows_at_least_sixty_languages_and_names_its_sources() -> None:
    classifier = packaged_classifier()
    assert len(set(classifier.languages)) == len(classifier.languages) >= 60
    assert "MPL-2.0" in classifier.sources


def test_saved_classifier_is_read_as_it_was(tmp_path) -> None:
    rows = np.arange(-64, 64, dtype=np.int8).reshape(8, 16)
    outputs = np.linspace(-1, 1, 34, dtype=np.float32).reshape(2, 17)
    classifier = LanguageClassifier(("aa", "bb"), rows, outputs, (0.25, -0.5), "texts")
    classifier.save(tmp_path / "two")
    read = load_classifier(tmp_path / "two")
    assert (read.languages, read.sharpness, read.sources) == (("aa", "bb"), (0.25, -0.5), "texts")
    np.testing.assert_array_equal(read.rows, rows)
    np.testing.assert_array_equal(read.outputs, outputs)


@pytest.mark.parametrize("damage", ["empty", "cut", "text", "other shapes", "not finite", "no languages"])
def test_a_damaged_file_is_named(tmp_path, damage: str) -> None:
    from safetensors.numpy import save

    rows, outputs = np.zeros((4, 16), np.int8), np.zeros((2, 17), np.float32)
    file = tmp_path / "languages.safetensors"
    LanguageClassifier(("aa", "bb"), rows, outputs).save(file)
    whole = file.read_bytes()
    about = '{"format": "napkin language classifier 1", "languages": ["aa", "bb"], "sharpness": [0, 0], "sources": ""}'
    metadata = {"about": about}
    outputs[0, 0] = np.nan
    contents = {
        "empty": b"",
        "cut": whole[:-1],
        "text": b"The old bridge",
        "other shapes": save({"rows": rows[:3], "outputs": np.zeros((2, 17), np.float32)}, metadata),
        "not finite": save({"rows": rows, "outputs": outputs}, metadata),
        "no languages": save({"rows": rows, "outputs": outputs}, {"about": "[]"}),
    }
    file.write_bytes(contents[damage])
    with pytest.raises(NapkinError, match=r"languages\.safetensors'.*language"):
        load_classifier(file)
