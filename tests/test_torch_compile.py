import os
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch._inductor import codecache, cpp_builder
from torch._inductor.exc import CppCompileError

from napkin.torch_compile import compiled_folder, set_up_compiler, stoppable_compiler

pytestmark = pytest.mark.skipif(os.name == "nt", reason="torch's own calling of the compiler is left as it is there")

# Writes a part, does what it is told to, then writes the rest.
FAKE = """
import pathlib, subprocess, sys, time
out = open(sys.argv[sys.argv.index("-o") + 1], "w")
out.write("a part")
out.flush()
{between}
out.write(" and the rest")
"""


@pytest.fixture(autouse=True)
def set_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpp_builder, "run_compile_cmd", cpp_builder.run_compile_cmd)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    set_up_compiler()


def compile_with(folder: Path, between: str) -> None:
    """What torch does for a kernel, with a compiler that does this between two writes."""
    (folder / "compiler.py").write_text(FAKE.format(between=between))
    cpp_builder.run_compile_cmd(f"{sys.executable} {folder}/compiler.py -o {folder}/made.so", cwd=str(folder))


def test_what_is_compiled_has_its_name_once_it_is_whole(tmp_path: Path) -> None:
    compile_with(tmp_path, f"assert not pathlib.Path({str(tmp_path)!r}, 'made.so').exists()")
    assert (tmp_path / "made.so").read_text() == "a part and the rest"


def test_a_compiler_that_fails_or_is_killed_leaves_nothing_and_its_words_are_told(tmp_path: Path) -> None:
    with pytest.raises(CppCompileError, match="no such thing"):
        compile_with(tmp_path, "sys.exit('no such thing')")
    with pytest.raises(CppCompileError):
        compile_with(tmp_path, "import os; os.kill(os.getpid(), 9)")
    assert {path.name for path in tmp_path.iterdir()} == {"compiler.py"}


def test_a_compiler_that_is_stopped_ends_with_all_its_processes_and_none_begins_after_it(tmp_path: Path) -> None:
    # As the driver of a compiler does, which waits for the compiler proper.
    waiting = (
        "process = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "pathlib.Path('pid').write_text(str(process.pid)); process.wait()"
    )
    ended: list[Any] = []

    def compile_until_stopped() -> None:
        for _ in range(2):
            try:
                compile_with(tmp_path, waiting)
            except BaseException as error:
                ended.append(type(error))

    with stoppable_compiler() as stop:
        worker = threading.Thread(target=compile_until_stopped)
        worker.start()
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
        stop()
        worker.join(60)
    assert ended == [KeyboardInterrupt] * 2
    pid = int((tmp_path / "pid").read_text())
    # Whose parent has gone may wait long for somebody who takes note.
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert not (tmp_path / "made.so").exists()
    compile_with(tmp_path, "")
    assert (tmp_path / "made.so").exists()


def test_what_waits_in_the_queue_of_a_stopped_compiler_is_dropped_and_the_next_one_has_a_queue() -> None:
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    if get_compile_threads() == 1:
        pytest.skip("there is no queue")
    begun = threading.Event()
    with stoppable_compiler() as stop:
        for _ in range(get_compile_threads()):
            AsyncCompile.submit(lambda: begun.wait(2))
        late = AsyncCompile.submit(begun.set)
        stop()
    assert late.cancelled()
    assert AsyncCompile.submit(lambda: "done").result(60) == "done"


def test_a_library_in_the_cache_that_lacks_its_checksum_or_differs_from_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache" / "ab"
    folder.mkdir(parents=True)
    (tmp_path / "cache").chmod(0o700)
    for name in ("whole", "flipped", "planted", "cut"):
        compile_with(tmp_path, "")
        (tmp_path / "made.so").rename(folder / f"{name}.so")
        (tmp_path / "made.so.sha256").rename(folder / f"{name}.so.sha256")
    (folder / "flipped.so").write_bytes(b"b part and the rest")
    (folder / "cut.so").write_bytes(b"")
    (folder / "planted.so.sha256").unlink()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    set_up_compiler()
    assert [path.name for path in folder.glob("*.so")] == ["whole.so"]


def test_generated_source_in_the_cache_is_compared_with_what_torch_generates(tmp_path: Path) -> None:
    name, path = codecache.write("x = 1", "py")
    Path(path).write_text("x = 2")
    assert codecache.write("x = 1", "py") == (name, path)
    assert Path(path).read_text() == "x = 1"


def test_a_cache_into_which_others_may_write_is_replaced_by_a_folder_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    set_up_compiler()
    assert "other users may write into it" in capsys.readouterr().err
    assert compiled_folder() != tmp_path / "cache"
    assert stat.S_IMODE(compiled_folder().stat().st_mode) == 0o700


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
