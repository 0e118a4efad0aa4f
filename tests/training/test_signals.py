import signal
import threading
from contextlib import nullcontext, suppress

import pytest

import napkin.training.signals as interruption_module
from napkin.training.signals import Interrupted, catch_interruption
from oracles.clock import Clock

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def handlers():
    """Signals as a program finds them, whatever started these tests."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_noted_and_stops_nothing(number: signal.Signals) -> None:
    with catch_interruption() as interruption:
        assert interruption.signal is None
        signal.raise_signal(number)
        assert interruption.signal == number


@pytest.mark.parametrize("number", SIGNALS)
def test_the_second_ctrl_c_acts_as_always(number: signal.Signals) -> None:
    with catch_interruption() as interruption:
        signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert interruption.signal == number


def test_afterwards_signals_act_as_before() -> None:
    with catch_interruption():
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with catch_interruption() as interruption:
        signal.raise_signal(signal.SIGINT)
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
