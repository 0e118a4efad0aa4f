"""What is masked, what only looks like it, and that no text takes long."""

import base64
import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from napkin.curation import Record
from napkin.curation.filters import PersonalData, mask_personal_data
from napkin.curation.filters.personal_data import is_card_number, is_iban, luhn_sum
from napkin.data.corpus import standard_library
from napkin.errors import NapkinError

# Of RFC 5737 and the like none is public; these are well-known public hosts, and examples that banks publish.
MASKED = [
    ("Write to jane.doe+news@mail.example.co.uk, please.", "Write to <EMAIL>, please."),
    ("<a_b%c@x-y.org>", "<<EMAIL>>"),
    ("...me@x.org....me@x.org.", "...<EMAIL>....<EMAIL>."),
    ("ping 8.8.8.8.", "ping <IP>."),
    ("2606:4700:4700::1111 and 2001:4860:4860:0:0:0:0:8888!", "<IP> and <IP>!"),
    ("Call +49 (0)30 1234567 or (212) 555-0123 now", "Call <PHONE> or <PHONE> now"),
    ("1-800-555-0199", "<PHONE>"),
    ("6502530000, (650)-253-0000 and 650.253.0000!", "<PHONE>, <PHONE> and <PHONE>!"),
    ("(650)253-0000", "<PHONE>"),
    (
        "London 020 7946 0958, 07700 900123; Berlin (030) 1234567 or 0171/1234567",
        "London <PHONE>, <PHONE>; Berlin <PHONE> or <PHONE>",
    ),
    ("Paris 01 42 68 53 00 ou 01.42.68.53.00.", "Paris <PHONE> ou <PHONE>."),
    ("06-12345678, (02) 9374 4000 and 06 98765432.", "<PHONE>, <PHONE> and <PHONE>."),
    ("card 4111 1111 1111 1111, 378282246310005", "card <CARD>, <CARD>"),
    ("5500-0000-0000-0004.", "<CARD>."),
    ("IBAN: GB82 WEST 1234 5698 7654 32 AND MORE", "IBAN: <IBAN> AND MORE"),
    ("DE89370400440532013000", "<IBAN>"),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIB\n-----END RSA PRIVATE KEY-----\n", "<SECRET>\n"),
]
LEFT = [
    "@home a@b user@host, x@y.c0m",
    "127.0.0.1 10.0.0.1 192.168.1.1 169.254.0.1 999.1.1.1 1.2.3 1.2.3.4.5 08.8.8.8",
    "fe80::1 ::1 std::string 12:30:45 fd00::1 2001:db8::1 2001:4860:4860",
    "4111 1111 1111 1112, 1234567890123456, 0000000000000000, 3.4111111111111111",
    "2020-10-11 12:00, 555-0123, 1 000 000 000, +1 2, 123-456-7890123",
    "DE89370400440532013001, GB82 WEST, XX00 1111 2222 3333",
    "AKIAAAAAAAAAAAAAAAAA ghp_" + "x" * 36 + " sk-learn-is-not-a-key-at-all-but-it-is-long-enough",
    "git clone git@github.com:owner/repository.git ssh://git@gitlab.com/x hg@bitbucket.org",
    "2147483647 4294967295 4294967296 1609459200 1234567890 5500000 9112530000 6509110000 65025300001 0.6502530000",
    "MA 02110-1301, <Buffer 01 02 03 04 05 06>, 01-02-2003 10:11, 07 08 09 10 11 12, #6502530000 a/6502530000",
    "06-20201231 05-2020-2021 (02) 93744 000 06-1234567890",
    "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----",
]


@pytest.mark.parametrize(("text", "expected"), MASKED)
def test_what_is_masked(text: str, expected: str) -> None:
    masked, counts = mask_personal_data(text)
    assert masked == expected
    assert sum(counts.values()) == expected.count("<") - text.count("<")


@pytest.mark.parametrize("text", LEFT)
def test_what_only_looks_like_it_is_left(text: str) -> None:
    assert mask_personal_data(text) == (text, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("at 192.0.2.146, 10.0.0.1 and 8.8.8.8.", "at <IP>, <IP> and <IP>."),
        ("2831823829, (283)-182-3829, (283) 182 3829 or 283-182-3829", "<PHONE>, <PHONE>, <PHONE> or <PHONE>"),
        ("999.1.1.1, 1.2.3, 283182382, 28318238291, a2831823829, 283-182-3829-1", None),
    ],
)
def test_with_unassigned_also_what_nobody_has_is_masked(text: str, expected: str | None) -> None:
    assert mask_personal_data(text, unassigned=True)[0] == (expected or text)
    record = PersonalData(unassigned=True).apply(Record("one", text))
    assert record.text == (expected or text)
    assert mask_personal_data("283-182-3829 192.0.2.146")[1] == {}


LETTERS, HEX = string.ascii_letters, "0123456789abcdef"
ALNUM = LETTERS + string.digits
URL = ALNUM + "_-"
# As the issuers, and the rules of gitleaks, describe them: prefix, characters, how many.
FORMATS = {
    **dict.fromkeys(("AKIA", "ASIA", "ABIA", "ACCA", "A3TX"), (string.ascii_uppercase + "234567", 16)),
    **dict.fromkeys(("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "npm_"), (ALNUM, 36)),
    **dict.fromkeys(("glpat-", "gldt-", "glrt-", "glft-", "glsoat-", "GR1348941"), (URL, 20)),
    **dict.fromkeys(("hf_", "api_org_"), (LETTERS, 34)),
    **dict.fromkeys(("sk_live_", "rk_live_", "sk_test_"), (ALNUM, 24)),
    **dict.fromkeys(("shpat_", "dapi"), (HEX, 32)),
    **dict.fromkeys(("glptt-", "pul-"), (HEX, 40)),
    **{"github_pat_": (ALNUM + "_", 82), "AIza": (URL, 35), "GOCSPX-": (URL, 28), "dop_v1_": (HEX, 64)},
    **{"sk-": (ALNUM, 48), "sk-proj-": (URL, 156), "sk-ant-api03-": (URL, 95), "pypi-AgEIcHlwaS5vcmc": (URL, 100)},
    **{"lin_api_": (ALNUM, 40), "gsk_": (ALNUM, 52), "pplx-": (ALNUM, 48), "LTAI": (ALNUM, 20)},
    **{"xoxb-": (string.digits, 11), "glimt-": (URL, 25), "gloas-": (URL, 64), "rubygems_": (HEX, 48)},
    **{"dckr_pat_": (URL, 27), "dckr_oat_": (URL, 32), "figd_": (URL, 40), "r8_": (ALNUM, 37), "xai-": (ALNUM, 80)},
    "AccountKey=": (ALNUM + "+/", 86),
}


@pytest.mark.parametrize("prefix", FORMATS)
def test_keys_of_services_are_masked(prefix: str) -> None:
    characters, length = FORMATS[prefix]
    draw = random.Random(prefix)

    def drawn(characters: str, length: int) -> str:
        return "".join(draw.choices(characters, k=length))

    end = "==" if prefix == "AccountKey=" else ""
    if prefix == "xoxb-":
        end = "-" + drawn(string.digits, 12) + "-" + drawn(ALNUM, 24)
    for _ in range(300):
        key = prefix + drawn(characters, length) + end
        assert mask_personal_data(f'token = "{key}"\n')[0] == 'token = "<SECRET>"\n', key


def test_a_key_without_a_digit_is_masked_and_words_are_not() -> None:
    assert mask_personal_data("hf_" + "kQzWmRbTnXcVpLdGsHfJyKwEaUoItBvNqZ")[0] == "<SECRET>"
    for words in (
        *("sk-this-is-how-a-package-would-be-called-by-people", "AKIA" + "EXAMPLE" * 2 + "EX", "hf_" + "a" * 34),
        *(
            "glpat-" + "x" * 20,
            "my_ghp_" + "kQzWmRbTnXcVpLdGsHfJyKwEaUoItBvNqZab",
            "hf_hub_download_of_all_files_of_a_repo",
        ),
    ):
        assert mask_personal_data(words) == (words, {})


@pytest.mark.parametrize("before", ["", "token=", "https://me:", r"\n", r"a\tb\r", "?key%3D", "密钥", "é"])
def test_a_key_is_masked_behind_escapes_and_letters_without_spaces(before: str) -> None:
    key = "hf_" + "kQzWmRbTnXcVpLdGsHfJyKwEaUoItBvNqZ"
    assert mask_personal_data(f"{before}{key}")[0] == f"{before}<SECRET>"


@pytest.mark.parametrize("before", ["n", "3D", "%3", "my_", "7"])
def test_a_key_is_not_the_end_of_a_longer_name(before: str) -> None:
    key = "hf_" + "kQzWmRbTnXcVpLdGsHfJyKwEaUoItBvNqZ"
    assert mask_personal_data(f"a {before}{key}")[0] == f"a {before}{key}"


def test_the_standard_library_holds_no_secrets_and_few_telephone_numbers() -> None:
    text = "\n".join(document.text for document in standard_library())
    counts = mask_personal_data(text, ["secret", "phone"])[1]
    assert counts.get("secret", 0) == 0
    assert counts.get("phone", 0) < 10


def test_signed_web_tokens_are_masked() -> None:
    def part(content: bytes) -> str:
        return base64.urlsafe_b64encode(content).decode().rstrip("=")

    token = ".".join([part(b'{"alg":"HS256"}'), part(b'{"sub":"1234567890"}'), part(bytes(range(100, 132)))])
    assert mask_personal_data(f"Bearer {token};")[0] == "Bearer <SECRET>;"


@given(st.text(alphabet="0123456789", min_size=12, max_size=18))
def test_luhns_digit_is_right_for_one_in_ten(digits: str) -> None:
    # Ten numbers that differ in their last digit have ten different sums modulo 10; and so has a changed first digit.
    assert sorted(luhn_sum(digits + last) % 10 for last in "0123456789") == list(range(10))
    assert len({luhn_sum(first + digits) % 10 for first in "0123456789"}) == 10


def test_published_examples_have_right_checks() -> None:
    cards = ["4012888888881881", "371449635398431", "6011000990139424", "30569309025904", "3530111333300000"]
    assert all(map(is_card_number, [*cards, "5105105105105100", "2223003122003222"]))
    accounts = [
        "NL91ABNA0417164300",
        "FR1420041010050500013M02606",
        "MT84MALT011000012345MTLCAST001S",
        "NO9386011117947",
    ]
    assert all(map(is_iban, accounts))
    # A remainder modulo 97 finds each change of one digit.
    account = accounts[0]
    for i in range(8, len(account)):
        assert not any(is_iban(account[:i] + digit + account[i + 1 :]) for digit in "0123456789" if digit != account[i])


@given(st.lists(st.sampled_from([*LEFT, *dict(MASKED), "@", "a.", "+1", "4111", "2001:"])).map(" | ".join))
def test_masking_twice_changes_nothing_more(text: str) -> None:
    masked, _ = mask_personal_data(text)
    assert mask_personal_data(masked)[0].count("<") == masked.count("<")


HOSTILE = ("a", "a.", "a@", "@a.", "1", "1 ", "1.", "+1", "(212) ", "212-", "2001:", "2:", "AB12 ", "A0", "sk-", "eyJa")


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("piece", [*HOSTILE, "-----BEGIN PRIVATE KEY-----", "AKIA", "4111 1111 "])
def test_the_work_for_a_hostile_line_grows_with_its_length_only(piece: str) -> None:
    # Time itself is no test: what is compared is whether a million characters finish here at all.
    line = piece * (2**18 // len(piece))
    mask_personal_data(line)
    mask_personal_data(line + "!")


def test_the_stage_masks_what_was_asked_for_and_counts_it() -> None:
    record = Record("x#0", "me@x.org 8.8.8.8 you@x.org")
    assert PersonalData(kinds=("mail",)).apply(record) is record
    assert record.text == "<EMAIL> 8.8.8.8 <EMAIL>"
    assert record.fields["personal_data"] == {"mail": 2}
    assert record.trace[-1].note == "mail: 2"
    with pytest.raises(NapkinError, match="kinds has 'mial'"):
        PersonalData(kinds=("mial",))
