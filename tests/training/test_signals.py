import os
import signal
import threading
from contextlib import nullcontext, suppress

import pytest

import napkin.training.signals as interruption_module
from napkin.distributed.ranks import ALONE
from napkin.training.signals import Interrupted, agree_on_signal, catch_interruption
from oracles.clock import Clock

WARNINGS = [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]
SIGNALS = [signal.SIGINT, signal.SIGTERM, *WARNINGS]


@pytest.fixture(autouse=True)
def handlers():
    """Signals as a program finds them, whatever started these tests."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in SIGNALS[1:]:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_noted_and_stops_nothing(number: signal.Signals) -> None:
    with catch_interruption() as interruption:
        assert interruption.signal is None
        signal.raise_signal(number)
        assert interruption.signal == number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_ctrl_c_acts_as_always(number: signal.Signals) -> None:
    with catch_interruption() as interruption:
        signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert interruption.signal == number


@pytest.mark.parametrize("number", WARNINGS)
def test_a_warning_counts_once_and_the_first_signal_is_the_one_that_stops(number: signal.Signals) -> None:
    with catch_interruption() as interruption:
        for each in (number, *WARNINGS, signal.SIGTERM, *WARNINGS):
            signal.raise_signal(each)
        assert interruption.signal == number
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_what_a_program_does_with_a_warning_is_left_to_it() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    with catch_interruption() as interruption:
        signal.raise_signal(signal.SIGUSR1)
        assert interruption.signal is None
    assert seen == [signal.SIGUSR1]


def test_ranks_whose_torchrun_has_gone_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = os.getppid()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with catch_interruption() as interruption:
        assert agree_on_signal(ALONE, interruption) is None
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert agree_on_signal(ALONE, interruption) == signal.SIGTERM
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.setattr(os, "getppid", lambda: parent)
    with catch_interruption() as interruption:
        monkeypatch.setattr(os, "getppid", lambda: 1)
        # Started by something else, which may end before the run does.
        assert agree_on_signal(ALONE, interruption) is None


def test_afterwards_signals_act_as_before() -> None:
    with catch_interruption():
        assert all(signal.getsignal(number) != signal.SIG_DFL for number in SIGNALS)
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    assert all(signal.getsignal(number) == signal.SIG_DFL for number in SIGNALS[1:])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_ignored(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    with catch_interruption() as interruption:
        signal.raise_signal(number)
        assert interruption.signal is None
        signal.raise_signal(signal.SIGTERM)
        assert interruption.signal == signal.SIGTERM


def test_the_signal_itself_ends_what_a_block_waits_for_and_nothing_after_it() -> None:
    ended: list[object] = []
    with catch_interruption() as interruption, interruption.ending(lambda: ended.append(interruption.signal)):
        signal.raise_signal(signal.SIGTERM)
        assert ended == [signal.SIGTERM]
    with catch_interruption() as interruption:
        with interruption.ending(lambda: ended.append(None)):
            pass
        signal.raise_signal(signal.SIGTERM)
    assert ended == [signal.SIGTERM]


def test_in_a_thread_signals_are_left_to_the_main_one() -> None:
    seen: list[object] = []

    def work() -> None:
        with catch_interruption() as interruption:
            seen.append(signal.getsignal(signal.SIGTERM))
            seen.append(interruption.signal)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL, None]


@pytest.mark.parametrize(("seconds", "patience", "done"), [(1.0, 2.5, 3), (1.0, 3.0, 6), (0.0, 0.5, 6)])
def test_a_step_that_would_take_long_yet_is_given_up_between_its_micro_batches(
    monkeypatch: pytest.MonkeyPatch, seconds: float, patience: float, done: int
) -> None:
    clock = Clock(seconds_per_reading=0)
    monkeypatch.setattr(interruption_module, "time", clock)
    monkeypatch.setattr(interruption_module, "PATIENCE_SECONDS", patience)
    parts: list[str] = []
    with catch_interruption() as interruption:
        watch = interruption.giving_up_long_steps(lambda part: nullcontext(parts.append(part)), 6)
        with suppress(Interrupted):
            for number in range(6):
                with watch("forward"):
                    clock.now += seconds
                if number == 2:
                    signal.raise_signal(signal.SIGTERM)
    assert len(parts) == done
