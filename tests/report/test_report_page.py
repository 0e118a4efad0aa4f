import base64
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from napkin.errors import NapkinError
from napkin.report.page import write_report
from napkin.report.templates import UPLOT, read_asset
from report.conftest import metrics_line

VOID = {"meta", "link", "br", "wbr"}


class Page(HTMLParser):
    """A page as a browser's parser sees it: elements, attributes, and the text by the element it stands in."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, list[str]] = {}
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += attrs
        self._part_words()
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self._part_words()

    def handle_data(self, data):
        for tag in set(self.open):
            self.texts[tag][-1] += data

    def _part_words(self):
        if "body" in self.open:
            self.texts["body"][0] += " "

    @property
    def text(self) -> str:
        return " ".join(self.texts["body"][0].split())


def report_of(run: Path) -> Page:
    page = Page(write_report(run))
    assert not page.open
    return page


def assert_scripts_are_allowed_by_hash(page: Page, number: int) -> None:
    """Every script but the data is allowed by its hash, and no other is."""
    scripts = [text for text in page.texts["script"] if not text.startswith("{")]
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = re.search(r"script-src ([^;]*);", page.source)
    assert allowed
    assert allowed[1].split() == [f"'sha256-{digest}'" for digest in digests]
    assert len(scripts) == number


def test_the_losses_of_all_held_out_text_and_of_a_sample_say_which_they_are(full_run):
    with (full_run / "recipe.toml").open("a") as recipe:
        recipe.write("\n[training]\nevaluation_tokens = 4321\n")
    text = report_of(full_run).text
    logged = [json.loads(line) for line in (full_run / "metrics.jsonl").read_text().splitlines()]
    last = [each for each in logged if each.get("validation_loss") is not None][-1]
    evaluation = json.loads((full_run / "evaluation.json").read_text())
    begin = text.index(f"held-out loss {evaluation['loss']:.3f}")
    tile = text[begin : text.index("bits per byte", begin)]
    assert f"all {evaluation['tokens']:,} tokens" in tile
    assert f"{last['validation_loss']:.3f}" in tile
    assert "sample of 4,321" in tile


def test_held_out_text_that_is_shorter_than_the_sample_is_not_said_to_be_sampled(full_run):
    tokens = json.loads((full_run / "evaluation.json").read_text())["tokens"]
    with (full_run / "recipe.toml").open("a") as recipe:
        recipe.write(f"\n[training]\nevaluation_tokens = {tokens}\n")
    page = report_of(full_run)
    assert "of a sample" not in page.text + page.source
    (full_run / "evaluation.json").unlink()
    assert f"of a sample of up to {tokens:,} tokens" in report_of(full_run).source


def test_a_finished_run_shows_its_figures_in_order(full_run):
    text = report_of(full_run).text
    shown = ["shakespeare", "300 steps over 1,228,800 tokens on EPYC <16 cores>.", "held-out loss 2.240"]
    shown += ["bits per byte 1.71 xz 3.11, gzip 3.38", "time 3 min 04 s", "MFU 41.2% HFU 43.2%"]
    shown += ["Planned and measured", "parameters biases & norms 800,000 812,544 812,544 exact", "1.02"]
    shown += ["Loss", "Bits per byte", "Memory at the peak", "380 MB", "Where the time went", "1 min 50 s", "60.1%"]
    shown += ["Samples", "<script>", "Recipe", "<small & quick>", "Machine and versions", "1.20 TFLOP/s"]
    place = 0
    for words in shown:
        place = text.index(words, place)
    assert "not available yet" not in text


def test_what_the_loop_adds_to_its_steps_is_one_figure(full_run):
    # data 1.5 and other 2.5, of these and forward 60, backward 110.5, optimizer 9.
    overhead = "Overhead of the training loop, which is all but forward, backward and optimizer "
    assert f"{overhead}(data and other): 4.00 s, 2.2% of the steps’ time." in report_of(full_run).text
    measurement = json.loads((full_run / "measurement.json").read_text())
    (full_run / "measurement.json").write_text(json.dumps({**measurement, "seconds": {"metering": 1.0, "other": 2.0}}))
    assert "Overhead of the training loop" not in report_of(full_run).text


def test_the_conventions_are_said(full_run):
    text = report_of(full_run).text
    for words in ["query–key pair", "causal", "dense", "1 GB is 10⁹ bytes", "MFU leaves recomputed FLOPs out"]:
        assert words in text


def test_what_the_run_wrote_is_shown_as_text_and_never_run(full_run):
    page = report_of(full_run)
    recipe, samples = (full_run / "recipe.toml").read_text(), (full_run / "samples.txt").read_text()
    # A parser drops the line break that follows <pre>.
    assert [text.removeprefix("\n") for text in page.texts["pre"]] == [samples, recipe]
    assert_scripts_are_allowed_by_hash(page, 3)
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_hostile_names_in_every_file_stay_text(full_run, plan):
    evil = "\"'><img src=x onerror=alert(1)>$x_1$"
    plan["device"]["name"] = plan["device"]["format"] = evil
    plan["table"] = [{"quantity": evil, "unit": "count", "rule": 1, "count": 1, "note": evil}]
    for name in ["peak_by_category", "flops_by_phase", "seconds_by_operator"]:
        plan[name] = {evil: 1.0}
    plan["versions"] = {evil: evil}
    (full_run / "plan.json").write_text(json.dumps(plan))
    measurement = json.loads((full_run / "measurement.json").read_text())
    measurement["seconds"] = {evil: 1.0}
    measurement["table"] = plan["table"]
    (full_run / "measurement.json").write_text(json.dumps(measurement))
    page = report_of(full_run)
    assert "img" not in page.elements
    assert page.text.count("onerror=alert(1)") >= 10


def test_the_page_fetches_nothing(full_run):
    page = report_of(full_run)
    references = [value or "" for name, value in page.attributes if name in {"src", "href", "xlink:href", "action"}]
    assert references
    assert all(reference.startswith(("#", "data:")) for reference in references)
    # The licence comment of the library has its address; nothing else has one.
    own = page.source.replace(read_asset(UPLOT), "")
    assert "://" not in own
    assert "@import" not in own
    assert "url(" not in own
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|sendBeacon|importScripts)\b", page.source)
    policy = r"default-src 'none'; script-src( 'sha256-[\w+/=]+'){3}; style-src 'unsafe-inline'; img-src data:"
    [found] = [value or "" for name, value in page.attributes if (value or "").startswith("default-src")]
    assert re.fullmatch(f"{policy}; base-uri 'none'; form-action 'none'", found)


def test_a_run_that_is_only_planned_says_what_is_not_there_yet(planned_run):
    text = report_of(planned_run).text
    assert "300 steps of 4,096 tokens planned on EPYC <16 cores>; none is logged yet." in text
    assert "peak memory 403 MB fits in 8.00 GB" in text
    assert "time 2 min 36 s 520 ms per step" in text
    assert "No step has been logged yet." in text
    assert text.count("not available yet") == 4
    assert "meter/count" not in text


def test_a_run_with_a_recipe_alone_has_a_page(planned_run):
    (planned_run / "plan.json").unlink()
    assert "Nothing is planned or logged yet." in report_of(planned_run).text


def test_a_plan_that_does_not_fit_is_a_warning(planned_run, plan):
    (planned_run / "plan.json").write_text(json.dumps({**plan, "fits": False}))
    text = report_of(planned_run).text
    assert "The plan does not fit into the 8.00 GB of EPYC <16 cores>." in text
    assert "peak memory 403 MB does not fit in 8.00 GB" in text


def test_a_run_killed_in_the_middle_of_a_line_is_shown_up_to_there(running_run):
    with (running_run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 121, "tok')
    text = report_of(running_run).text
    assert "At step 120 of 300 on EPYC <16 cores>: still in training, or interrupted." in text
    assert "validation loss 3.333 at step 100" in text
    assert "time 1 min 12 s about 1 min 48 s to go" in text


def test_a_run_that_no_process_is_training_has_stopped(running_run):
    page = Page(write_report(running_run, training=False))
    assert "Stopped at step 120 of 300 on EPYC <16 cores>: no process is training it." in page.text
    assert "data-written" not in dict(page.attributes)
    assert ("http-equiv", "refresh") not in page.attributes


def test_a_page_of_a_run_in_training_runs_its_own_script_and_no_other(running_run):
    page = Page(write_report(running_run, training=True, every=lambda: 40.0))
    assert "Training, step 120 of 300 on EPYC <16 cores>. Written 20" in page.text
    # Three times 40 seconds and the longest pause between two logged steps, and a minute.
    seconds = [json.loads(line)["seconds"] for line in (running_run / "metrics.jsonl").read_text().splitlines()]
    longest = max(later - earlier for earlier, later in itertools.pairwise([0.0, *seconds]))
    assert dict(page.attributes)["data-timeout"] == str(round(3 * (40 + longest) + 60))
    assert_scripts_are_allowed_by_hash(page, 4)
    # The next page is due after 40 seconds and a step, and the browser's script counts down to it.
    assert dict(page.attributes)["data-due"] == str(round(40 + 0.6))


def test_a_loss_that_stops_being_a_number_is_a_warning(running_run):
    with (running_run / "metrics.jsonl").open("a") as file:
        for step in (121, 122):
            file.write(json.dumps({"step": step, "tokens": 4096 * step, "seconds": 1.0, "loss": None}) + "\n")
    text = report_of(running_run).text
    assert "The loss was not finite at 2 of 122 logged steps, first at step 121." in text


def test_a_resumed_run_is_whole_and_says_which_steps_were_metered(full_run):
    measurement = json.loads((full_run / "measurement.json").read_text())
    (full_run / "measurement.json").write_text(json.dumps({**measurement, "steps": 120, "seconds": {"forward": 72.0}}))
    text = report_of(full_run).text
    assert "300 steps over 1,228,800 tokens" in text
    assert "time 3 min 00 s 300 steps" in text
    assert "Over the 120 of 300 steps that one process ran." in text


def test_a_remainder_of_time_below_zero_does_not_stop_the_report(full_run):
    measurement = json.loads((full_run / "measurement.json").read_text())
    measurement["seconds"]["other"] = -0.0001
    (full_run / "measurement.json").write_text(json.dumps(measurement))
    assert "Where the time went" in report_of(full_run).text


def test_operators_without_a_flop_count_are_a_warning(planned_run, plan):
    (planned_run / "plan.json").write_text(json.dumps({**plan, "unknown_operators": {"fft": 3, "sort": 1}}))
    assert "are missing from the count: fft, sort." in report_of(planned_run).text


def test_a_malformed_file_leaves_the_earlier_report_as_it_was(full_run):
    before = write_report(full_run).read_bytes()
    (full_run / "evaluation.json").write_text("{")
    with pytest.raises(NapkinError, match=r"evaluation\.json"):
        write_report(full_run)
    assert (full_run / "report.html").read_bytes() == before


def test_a_later_report_replaces_the_earlier_and_leaves_nothing_else(running_run):
    page = write_report(running_run)
    before = {path.name for path in running_run.iterdir()}
    (running_run / "samples.txt").write_text("Once more unto the breach")
    assert write_report(running_run) == page
    assert "Once more unto the breach" in page.read_text(encoding="utf-8")
    assert {path.name for path in running_run.iterdir()} == before | {"samples.txt"}


def test_the_same_run_gives_the_same_bytes_in_another_process(full_run):
    page = write_report(full_run)
    before = page.read_bytes()
    code = "import sys, pathlib; from napkin.report import write_report; write_report(pathlib.Path(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", code, str(full_run)],
        check=True,
        env={"PYTHONHASHSEED": "5", "TZ": "Asia/Tokyo", "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
    )
    assert page.read_bytes() == before


@pytest.mark.thorough
def test_a_long_run_has_a_small_page(full_run):
    line = '{"step": %d, "tokens": %d, "loss": %f, "seconds": %d, "tokens_per_second": %d, "mfu": 0.4}\n'
    with (full_run / "metrics.jsonl").open("w") as file:
        file.writelines(line % (n, 4096 * n, 3 + n % 13 / 50, n, 6000 + n % 17) for n in range(1, 30_001))
    assert write_report(full_run).stat().st_size < 150_000


def test_long_samples_are_cut_and_the_rest_is_counted(full_run):
    (full_run / "samples.txt").write_text("a\0" * 11_000)
    page = report_of(full_run)
    assert page.texts["pre"][0].strip() == "a\N{REPLACEMENT CHARACTER}" * 10_000
    assert "2,000 more characters are in samples.txt." in page.text


def test_importing_the_report_loads_neither_torch_nor_matplotlib():
    code = "import sys, napkin.report.page; print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert printed.stdout.strip() == "[]"


def test_every_heading_is_in_the_contents_and_has_its_anchor(full_run):
    page = report_of(full_run)
    contents = re.search(r'<nav class="side".*?</nav>', page.source, re.DOTALL)
    assert contents
    listed = re.findall(r'<li><a href="#([\w-]+)">([^<]*)</a></li>', contents[0])
    sections = re.findall(r'<section id="([\w-]+)">\s*<h2><a href="#([\w-]+)">([^<]*)</a></h2>', page.source)
    assert [(name, title) for name, _, title in sections] == listed
    assert all(name == link for name, link, _ in sections)
    assert len(sections) == page.source.count("<section") == page.source.count("<h2") == 10
    assert all(f"<h2>{title}" not in page.source for title in ("Loss", "Recipe"))


def test_an_overfitted_run_is_a_warning(running_run):
    lines = [
        metrics_line(step, loss=5.0 - step / 50, validation_loss=4 + abs(step - 50) / 60) for step in range(1, 151)
    ]
    (running_run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    text = report_of(running_run).text
    assert "validation loss 5.667 at step 150; lowest 4.000 at step 50" in text
    assert "The run is overfitted: the validation loss rose from its lowest, 4.0000 at step 50, to 5.6667" in text


def test_the_figures_of_the_charts_are_also_a_table(running_run):
    text = report_of(running_run).text
    assert "The charts need JavaScript; their figures are also in a table." in text
    step_100 = "100 409,600 1 min 00 s 3.1253 3.3333 0.00300 0.700 6.80 k 42.5% 403 MB"
    assert step_100 in text
