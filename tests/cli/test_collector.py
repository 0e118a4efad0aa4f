"""Commands begin with the garbage collector put off, and leave it as it was."""

import gc

import pytest

from napkin import cli


def test_the_collector_begins_late_and_is_as_usual_afterwards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual, callbacks = gc.get_threshold(), len(gc.callbacks)
    seen: list[tuple[int, int, int]] = []

    def command(_: list[str]) -> int:
        seen.append(gc.get_threshold())
        # A command that runs others changes nothing.
        assert cli.main(["--version"]) == 0
        seen.append(gc.get_threshold())
        gc.collect(0)
        seen.append(gc.get_threshold())
        return 0

    monkeypatch.setattr(cli.ALL, "run", lambda name, rest: command(list(rest)))
    assert cli.main(["anything"]) == 0
    late = (cli.FIRST_COLLECTION, *usual[1:])
    assert seen == [late, late, usual]
    assert (gc.get_threshold(), len(gc.callbacks)) == (usual, callbacks)
    assert capsys.readouterr().out.startswith("napkin ")
