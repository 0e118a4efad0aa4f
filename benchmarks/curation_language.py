"""The language of one sentence: napkin beside langid, py3langid and lingua, on the same sentences.

    pip install --no-deps --target PEERS langid py3langid lingua-language-detector
    PYTHONPATH=PEERS python benchmarks/curation_language.py udhr2.zip

The sentences are those of the Universal Declaration of Human Rights (the package `udhr2` of nltk_data, from the
UDHR in Unicode project) in all languages that napkin, langid and lingua know. napkin's classifier never saw any of it:
it was trained on messages, help and manuals of programs. Settings of the training were chosen by every other sentence;
those between are counted here. Every library chooses among all languages it knows, then
among those of the test alone. A peer that is not installed is named and left out.
"""

import argparse
import importlib
import re
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from napkin.languages import packaged_classifier, reliability
from napkin.languages.classifier import load_classifier
from result_files import existing, heading
from turns import BRACKETS, ratio_spread, seconds_of, spread

PARTS = 6
"""Parts of the sentences, of which each is timed."""

FILES = """
    af=afr ar=arb az=azj_latn be=bel bg=bul bn=ben bs=bos_latn ca=cat cs=ces cy=cym da=dan de=deu el=ell_monotonic
    en=eng eo=epo es=spa et=est eu=eus fa=pes_1 fi=fin fr=fra ga=gle gu=guj he=heb hi=hin hr=hrv hu=hun hy=hye id=ind
    is=isl it=ita ja=jpn ka=kat kk=kaz ko=kor la=lat lt=lit lv=lav mk=mkd mn=khk mr=mar ms=mly_latn nb=nob nl=nld nn=nno
    pa=pan pl=pol pt=por_PT ro=ron ru=rus sk=slk sl=slv sq=als sr=srp_cyrl sv=swe sw=swh ta=tam th=tha tl=tgl tr=tur
    uk=ukr ur=urd vi=vie xh=xho zh=cmn_hans zu=zul
"""
"""Code = file: languages of both langid and lingua of which the archive has a text."""
WEB = "en ru de ja zh es fr it pt nl pl tr cs vi id sv ko ar ro fa el uk hu da th sk fi nb bg hi".split()
"""Thirty of the most frequent languages of the web."""

Guess = Callable[[str], str]


def sentences(archive: str, languages: Sequence[str]) -> list[tuple[str, str]]:
    """(language, sentence): lines divided after full stops, of at least 20 letters."""
    found: dict[tuple[str, str], None] = {}
    with zipfile.ZipFile(archive) as texts:
        for code, _, file in (each.partition("=") for each in FILES.split()):
            if code in languages:
                text = texts.read(f"udhr2/{file}.txt").decode()
                for line in text.splitlines():
                    for sentence in re.split(r"(?<=[.!?;:։।。؛])\s+", line.strip()):
                        if sum(map(str.isalpha, sentence)) >= 20 or (
                            code in ("zh", "ja", "ko", "th") and sum(map(str.isalpha, sentence)) >= 8
                        ):
                            found[code, sentence] = None
    # Two languages may have a sentence in common: it cannot be told.
    seen = Counter(sentence for _, sentence in found)
    return [each for each in found if seen[each[1]] == 1]


def peers(among: Sequence[str] | None) -> Iterator[tuple[str, Guess]]:
    """What is installed of langid, py3langid and lingua, as functions from a sentence to an ISO 639-1 code."""
    # Norwegian is `no` in langid's labels, beside `nb` and `nn`.
    labels = among and [*among, *(["no"] if "nb" in among else [])]
    for name in ("langid", "py3langid"):
        try:
            module = importlib.import_module(f"{name}.langid")
        except ImportError:
            print(f"{name} is not installed: left out")
            continue
        if name == "langid":
            identifier = module.LanguageIdentifier.from_modelstring(module.model)
        else:
            identifier = module.LanguageIdentifier.from_model_file(module.MODEL_FILE)
        if labels:
            identifier.set_languages([each for each in labels if each in identifier.nb_classes])

        def guess(text: str, identifier: Any = identifier) -> str:
            language = str(identifier.classify(text)[0])
            return "nb" if language == "no" else language

        yield name, guess
    try:
        lingua = importlib.import_module("lingua")
    except ImportError:
        print("lingua-language-detector is not installed: left out")
        return
    builder = lingua.LanguageDetectorBuilder
    if among:
        builder = builder.from_iso_codes_639_1(*(getattr(lingua.IsoCode639_1, each.upper()) for each in among))
    else:
        builder = builder.from_all_languages()
    detector = builder.with_preloaded_language_models().build()

    def guess_of_lingua(text: str) -> str:
        language = detector.detect_language_of(text)
        return language.iso_code_639_1.name.lower() if language else ""

    yield "lingua", guess_of_lingua


def measure(name: str, guess: Guess, texts: Sequence[tuple[str, str]]) -> tuple[float, float, list[float]]:
    """Print and return the accuracy, that of the languages of WEB, and the microseconds per sentence of each part."""
    guess(texts[0][1])
    guesses = [""] * len(texts)
    microseconds: list[float] = []
    for part in range(PARTS):
        # Sentences of a language follow each other: each part has all languages.
        some = slice(part, None, PARTS)
        start = time.perf_counter()
        guesses[some] = [guess(sentence) for _, sentence in texts[some]]
        microseconds.append(1e6 * (time.perf_counter() - start) / max(1, len(texts[some])))
    right = [found == language for found, (language, _) in zip(guesses, texts, strict=True)]
    accuracy = sum(right) / len(right)
    of_the_web = [is_right for (language, _), is_right in zip(texts, right, strict=True) if language in WEB]
    web = sum(of_the_web) / len(of_the_web)
    wrong = Counter((lang, found) for found, (lang, _) in zip(guesses, texts, strict=True) if found != lang)
    confused = ", ".join(f"{lang}→{found or '?'} {count}" for (lang, found), count in wrong.most_common(6))
    print(
        f"  {name:10} {accuracy:8.2%} {web:9.2%} {spread(microseconds, '{:.1f}'.format):>26}   {confused}", flush=True
    )
    return accuracy, web, microseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=existing, help="udhr2.zip")
    parser.add_argument("--classifier", help="a file of `napkin data train-languages` instead of the package's")
    options = parser.parse_args()
    heading("The language of one sentence beside other identifiers", BRACKETS)
    classifier = load_classifier(options.classifier) if options.classifier else packaged_classifier()
    texts = sentences(options.archive, classifier.languages)[1::2]
    languages = sorted({language for language, _ in texts})
    letters = sum(len(sentence) for _, sentence in texts) / len(texts)
    print(f"{len(texts)} sentences of {len(languages)} languages, {letters:.0f} characters each: {' '.join(languages)}")
    for title, among in (("all of its languages", None), ("the languages of the test", languages)):
        print(f"choosing among {title}:")
        print("  library    accuracy  WEB only                µs/sentence   most frequent errors: language→guess")
        ours = classifier.among(languages) if among else classifier
        accuracy, web, microseconds = measure("napkin", lambda text, ours=ours: ours.identify(text, 0).language, texts)
        for name, guess in peers(among):
            theirs, their_web, longer = measure(name, guess, texts)
            points = f"{100 * (accuracy - theirs):+.2f} points, {100 * (web - their_web):+.2f} of WEB"
            print(f"  {'':10} napkin: {points}, {ratio_spread(longer, microseconds, '{:.0f}'.format)} × as fast")
    guesses = [classifier.identify(sentence, 0) for _, sentence in texts]
    right = [guess.language == language for guess, (language, _) in zip(guesses, texts, strict=True)]
    rows, error = reliability([guess.probability for guess in guesses], right)
    print(f"calibration: expected error {error:.4f}")
    for row in rows:
        print(f"  {row.guesses:5} guesses of mean probability {row.probability:.3f}: {row.right:.3f} are right")
    long_text = "\n".join(sentence for _, sentence in texts)
    megabytes = len(long_text.encode()) / 1e6
    rates = [megabytes / seconds_of(lambda: classifier.identify(long_text)) for _ in range(PARTS)]
    print(f"one document of all sentences: {spread(rates, '{:.0f}'.format)} MB/s")


if __name__ == "__main__":
    main()
