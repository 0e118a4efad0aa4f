"""`napkin bench`: what it prints, for people and programs; what it refuses; what an interruption leaves."""

import json
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import torch

from napkin.benchmarking.case import Case, Subject
from napkin.benchmarking.collective_bench import COLLECTIVES
from napkin.benchmarking.module_target import MODULES
from napkin.benchmarking.operators import OPERATORS, OperatorTarget
from napkin.cli import BENCH
from napkin.hardware.doctor import _libraries
from napkin.hardware.host import usable_cores
from napkin.kernels.operator_forms import Choice, keep_choices
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import format_recipe
from reliability.harness import Napkin as Commands
from reliability.harness import wait_until

SWIGLU = ("bench", "swiglu", "--form", "kernel", "reference", "--shapes", "tokens=8,d_ff=8", "--seconds", "0.001")


def test_without_a_name_everything_that_can_be_timed_is_listed(napkin) -> None:
    done = napkin("bench")
    assert done.status == 0
    names = [line.split()[0] for line in done.out.splitlines()[1:]]
    assert names == [*OPERATORS, *MODULES, *COLLECTIVES, "forms"]
    assert [form.chosen_by for form in BENCH.others.values()] == [tuple(MODULES), tuple(COLLECTIVES)]


def test_choices_of_forms_are_shown_by_bench_and_by_doctor(
    napkin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAPKIN_CACHE_DIR", str(tmp_path))
    # One that libraries find too, as the doctor looks in a process of its own.
    monkeypatch.setenv("OMP_NUM_THREADS", str(usable_cores()))
    done = napkin("bench", "forms")
    assert done.out.splitlines()[1] == (
        "no forms were timed: the first plan of a longer run on a CPU times those of its blocks"
    )
    torch.set_num_threads(usable_cores())
    keep_choices([Choice("blocks", ("bf16", "4 × 256 tokens"), "quick", "slow", 2e-3, {"slow": 1.0, "quick": 0.25})])
    done = napkin("bench", "forms")
    assert done.status == 0
    assert done.out.splitlines()[-1].split() == [
        *("blocks", "quick", "slow", "2.00", "ms", "quick", "0.25", "bf16,", "4", "×", "256", "tokens")
    ]
    (choice,) = json.loads(napkin("bench", "forms", "--json").out)["choices"]
    assert choice["ratios"] == {"slow": 1.0, "quick": 0.25}
    fastest = {each.what: each.found for each in _libraries()}["fastest blocks"]
    assert fastest == "quick for 1 shape; see `napkin bench forms`"


@pytest.mark.thorough
def test_programs_get_every_sample_and_what_else_was_so(napkin) -> None:
    done = napkin(*SWIGLU, "--pass", "both", "--cache", "both", "--against", "reference", "--json")
    found = json.loads(done.out)
    assert [(row["form"], row["cache"]) for row in found["rows"]] == [
        (form, cache) for cache in ("warm", "cold") for form in ("kernel", "reference")
    ]
    for row in found["rows"]:
        assert len(row["samples"]) == row["seconds"]["samples"] >= 6
        assert min(row["samples"]) <= row["seconds"]["low"] <= row["seconds"]["high"] <= max(row["samples"])
        assert row["shape"] == {"tokens": 8, "d_ff": 8}
        assert ("ratio" in row) == (row["form"] == "kernel")
    assert found["conditions"].keys() == {*("measured_at", "device", "threads", "torch", "before", "after")}


def test_what_all_rows_share_is_said_once(napkin) -> None:
    done = napkin(*SWIGLU, "--pass", "forward", "--against", "reference", "--precision", "fp32")
    shared, headings, *rows = done.out.splitlines()
    assert shared == "swiglu: tokens 8, d_ff 8, precision fp32, pass forward, cache warm"
    # Where other programs were running, there is a note.
    named = [heading for heading in headings.split() if heading != "note"]
    assert named == ["form", "median", "±", "FLOP/s", "bytes/s", "of", "roof", "bound", "over", "reference"]
    assert [row.split()[0] for row in rows[:2]] == ["kernel", "reference"]


def test_a_recipe_gives_the_sizes_of_a_part_and_shapes_change_them(napkin, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(format_recipe(Recipe()).replace("d_model = 256", "d_model = 32"))
    options = ("--pass", "forward", "--seconds", "0.001", "--json")
    done = napkin("bench", "mlp", "--recipe", str(recipe), "--shapes", "batch_size=2,context_length=8", *options)
    (row,) = json.loads(done.out)["rows"]
    assert row["shape"] == {"batch_size": 2, "d_model": 32, "context_length": 8}
    assert row["flops"] == 2 * 16 * 3 * 32 * Recipe().model.__class__(d_model=32).resolved_d_ff


@pytest.mark.thorough
def test_a_sweep_names_the_rows_that_do_not_fit_and_ends_well(napkin) -> None:
    shapes = ("size=small,context_length=8,batch_size=1", "size=2.7B,context_length=1024,batch_size=4096")
    done = napkin("bench", "mlp", "--sweep", "--shapes", *shapes, "--compiled", "off", "--precision", "fp32", "--json")
    rows = json.loads(done.out)["rows"]
    assert [(row["pass"], bool(row["samples"])) for row in rows] == [
        ("forward", True),
        ("backward", True),
        ("forward", False),
        ("backward", False),
    ]
    assert rows[0]["shape"]["d_ff"] == 3072
    assert all(row["refused"].startswith("out of memory by plan") for row in rows[2:])


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("swigluu",), "'swigluu' cannot be timed: did you mean 'swiglu'?"),
        (("swiglu", "--shapes", "tokns=3"), "no dimension 'tokns': did you mean 'tokens'?"),
        (("swiglu", "--shapes", "tokens"), "'tokens' is not a shape"),
        (("swiglu", "--shapes", "tokens=0"), "tokens=0 is out of range"),
        (("block", "--shapes", "size=smal"), "did you mean 'small'?"),
        (("swiglu", "--form", "triton"), "no form 'triton'"),
        (("swiglu", "--against", "refrence+compiled"), "did you mean 'reference'?"),
        (("swiglu", "--pass", "step"), "--pass step is not a pass of it: use forward, backward, both"),
        (("swiglu", "--seconds", "inf"), "--seconds is inf"),
        (("swiglu", "--threads", "0"), "--threads is 0"),
        (("swiglu", "--preset", "gpt2"), "'--preset' is an option of `napkin bench module`"),
        (("block", "--preset", "gpt2", "--recipe", "none.toml"), "use one of them"),
        (
            ("all-reduce", "--precision", "bf16"),
            "'--precision' does not go with all-reduce, which is `napkin bench",
        ),
        (("all-reduce", "--shapes", "ranks=1"), "a collective has 2 to"),
        (("all-reduce", "--device", "cuda"), "start them with torchrun"),
    ],
)
def test_what_cannot_be_timed_is_refused_in_one_line(
    refusal, arguments: tuple[str, ...], line: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert line in refusal("bench", *arguments)


def test_ctrl_c_prints_the_rows_that_are_done(napkin, monkeypatch: pytest.MonkeyPatch) -> None:
    real = OperatorTarget.subject

    def interrupted(target: OperatorTarget, case: Case) -> Subject:
        if case.form == "reference":
            signal.raise_signal(signal.SIGINT)
        return real(target, case)

    monkeypatch.setattr(OperatorTarget, "subject", interrupted)
    done = napkin(*SWIGLU, "--pass", "forward", "--json")
    assert done.status == 130
    assert [row["form"] for row in json.loads(done.out)["rows"]] == ["kernel"]
    assert done.err == "bench: interrupted after 1 of 2 rows\n"


def test_ctrl_c_leaves_none_of_the_processes_of_a_collective(tmp_path: Path, server: subprocess.Popen[str]) -> None:
    command = Commands(tmp_path, server).start("bench", "all-reduce", "--seconds", "60")
    parent, children = psutil.Process(command.pid), list[psutil.Process]()

    def has_children() -> bool:
        children[:] = parent.children()
        return len(children) == 2

    wait_until(has_children, command)
    command.send(signal.SIGINT)
    assert (command.wait(), command.out.read_text()) == (130, "")
    assert command.err.read_text().endswith("bench: interrupted\n")
    assert not any(each.is_running() for each in children)
