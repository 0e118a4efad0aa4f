"""The fastest form of an operator is chosen by timing, once, for one processor."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from napkin.errors import NapkinError
from napkin.hardware import form_timing
from napkin.hardware.form_timing import choose_form, fastest_of
from napkin.kernels import operator_forms
from napkin.kernels.operator_forms import fastest_form, forget_choices, kept_choices, pinned_forms, this_processor

CLASS = ("fp32", 256)


@pytest.fixture(autouse=True)
def own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NAPKIN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("NAPKIN_FORMS", "measured")
    operator_forms._forms.cache_clear()
    yield
    operator_forms._forms.cache_clear()


def products(**times: int) -> Callable[[], dict[str, Callable[[], object]]]:
    """Forms that make so many products of the same matrices."""
    x = torch.randn(256, 256)

    def form(n: int) -> Callable[[], object]:
        return lambda: [x @ x for _ in range(n)]

    return lambda: {name: form(n) for name, n in times.items()}


def never() -> dict[str, Callable[[], object]]:
    raise AssertionError("timed again")


@pytest.mark.parametrize("default", ["quick", "slow"])
def test_the_form_that_does_four_times_the_work_is_never_chosen(default: str) -> None:
    forms = products(quick=1, slow=4)
    assert choose_form("product", CLASS, forms, default=default, seconds=0.01) == "quick"
    (choice,) = kept_choices()
    assert choice.ratios[default] == 1
    assert choice.ratios["slow"] > choice.ratios["quick"]


def test_a_kept_choice_is_used_again_and_a_forgotten_one_is_timed_again() -> None:
    choose_form("product", CLASS, products(torch=4, ours=1), default="torch", seconds=0.01)
    assert choose_form("product", CLASS, never, default="torch") == "ours"
    assert fastest_form("product", CLASS, "torch") == "ours"
    assert fastest_form("product", ("fp32", 512), "torch") == "torch"
    program = """
from napkin.kernels.operator_forms import fastest_form
import torch
torch.set_num_threads(int(__import__("sys").argv[1]))
print(fastest_form("product", ("fp32", 256), "torch"))
"""

    def in_another_process(threads: int = torch.get_num_threads(), **limits: str) -> str:
        command = [sys.executable, "-c", program, str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **limits})
        return done.stdout.strip()

    assert in_another_process() == "ours"
    # What was timed holds for other instructions, libraries' limits and threads no more.
    assert in_another_process(ATEN_CPU_CAPABILITY="default") == "torch"
    assert in_another_process(NUMBA_CPU_FEATURES="+avx2") == "torch"
    assert in_another_process(threads=torch.get_num_threads() + 1) == "torch"
    assert in_another_process(NAPKIN_FORMS="default") == "torch"
    forget_choices()
    assert fastest_form("product", CLASS, "torch") == "torch"
    with pytest.raises(AssertionError, match="timed again"):
        choose_form("product", CLASS, never, default="torch")


def test_the_table_of_another_processor_is_not_used() -> None:
    choose_form("product", CLASS, products(torch=4, ours=1), default="torch", seconds=0.01)
    (file,) = Path(os.environ["NAPKIN_CACHE_DIR"]).glob("operator-forms-*.json")
    text = file.read_text()
    for damaged in (text.replace(f'"{this_processor().name}"', '"another"'), text[:100], "", "[]"):
        file.write_text(damaged)
        operator_forms._forms.cache_clear()
        assert fastest_form("product", CLASS, "torch") == "torch"
    file.write_text(text)
    operator_forms._forms.cache_clear()
    assert fastest_form("product", CLASS, "torch") == "ours"


def test_pinned_forms_are_neither_timed_nor_kept() -> None:
    with pinned_forms({"product": "ours"}):
        assert choose_form("product", CLASS, never, default="torch") == "ours"
        with pinned_forms({"product": "theirs"}):
            assert fastest_form("product", CLASS, "torch") == "theirs"
        assert fastest_form("product", CLASS, "torch") == "ours"
    assert fastest_form("product", CLASS, "torch") == "torch"
    assert kept_choices() == []


def test_nothing_is_timed_where_the_user_wants_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAPKIN_FORMS", "default")
    assert choose_form("product", CLASS, never, default="torch") == "torch"
    monkeypatch.setenv("NAPKIN_FORMS", "fastest")
    with pytest.raises(NapkinError, match="NAPKIN_FORMS is 'fastest': use measured or default"):
        choose_form("product", CLASS, never, default="torch")


def test_a_choice_that_cannot_be_kept_is_used_with_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("NAPKIN_CACHE_DIR", str(file))
    with pytest.warns(UserWarning, match="cannot be kept"):
        assert choose_form("product", CLASS, products(torch=4, ours=1), default="torch", seconds=0.01) == "ours"
    # By operators too, and it is not timed again in this process.
    assert fastest_form("product", CLASS, "torch") == "ours"
    assert choose_form("product", CLASS, never, default="torch") == "ours"


def test_a_choice_stays_in_use_where_another_process_writes_the_table(tmp_path: Path) -> None:
    choose_form("product", CLASS, products(torch=4, ours=1), default="torch", seconds=0.01)
    (file,) = tmp_path.glob("operator-forms-*.json")
    file.unlink()
    choose_form("sum", CLASS, products(torch=4, ours=1), default="torch", seconds=0.01)
    assert fastest_form("product", CLASS, "torch") == "ours"


def test_a_default_that_takes_too_long_is_not_timed_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_timing, "MOST_SECONDS", 0.0)
    forms = products(torch=1)() | {"ours": never}
    assert choose_form("product", CLASS, lambda: forms, default="torch", seconds=0.01) == "torch"


def test_a_tie_and_an_unsure_gain_keep_the_default() -> None:
    torchs = [1.0, 1.1, 0.9, 1.0, 1.2, 1.0, 1.1, 1.0]
    noisy = [0.9, 1.2, 0.8, 1.1, 1.0, 0.9, 1.2, 0.9]
    assert fastest_of({"torch": torchs, "ours": torchs}, "torch") == ("torch", {"torch": 1.0, "ours": 1.0})
    assert fastest_of({"torch": torchs, "ours": noisy}, "torch")[0] == "torch"
    assert fastest_of({"torch": torchs, "ours": [0.99 * each for each in torchs]}, "torch")[0] == "torch"
    # Slower for a while, both: in pairs that cancels.
    slowed = [each * (3 if number > 3 else 1) for number, each in enumerate(torchs)]
    assert fastest_of({"torch": slowed, "ours": [0.95 * each for each in slowed]}, "torch")[0] == "ours"
    both = {"torch": torchs, "ours": [0.9 * each for each in torchs], "third": [0.8 * each for each in torchs]}
    assert fastest_of(both, "torch")[0] == "third"


def test_a_form_that_seems_to_be_faster_is_timed_until_it_is_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def samples(timed: list, clock: object, sampling: object) -> list[list[float]]:
        nonlocal calls
        calls += 1
        # Beside another process two of six samples are slow; the third time nobody disturbs.
        noisy = [8.0, 8.0, 12.0, 8.0, 12.0, 8.0]
        return [[10.0] * 6, noisy] if calls < 3 else [[10.0] * 12, [8.0] * 12]

    monkeypatch.setattr(form_timing, "sample_in_turns", samples)
    assert choose_form("product", CLASS, products(torch=1, ours=1), default="torch") == "ours"
    # The first rounds, and two more after what was open.
    assert calls == 3
