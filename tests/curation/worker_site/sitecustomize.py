"""What the workers of these tests import first: stages that only tests have, and an end at a chosen moment.

WORKER_ENDS is `N FILE`: before its N-th operation on a file of a corpus, one worker makes the file and ends, once; with
a third word, so does the command that started it.
"""

import os
import signal
import sys
from typing import Any

from napkin.curation.registry import STAGES, StageEntry

STAGES["first"] = StageEntry("curation_stages:FirstOfEachText", "keep the first of documents with the same text")
STAGES["fragile"] = StageEntry("curation_stages:Fragile", "fail on some documents")


def end_at(number: int, file: str, *, with_parent: bool) -> None:
    done = 0

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal done
        if event not in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") or os.path.exists(file):
            return
        if any(".work" in str(each) for each in arguments):
            done += 1
            if done == number:
                os.close(os.open(file, os.O_CREAT))
                if with_parent:
                    os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


if "WORKER_ENDS" in os.environ and "napkin.curation.engine.workers" in " ".join(sys.orig_argv):
    at, path, *parent = os.environ["WORKER_ENDS"].split()
    end_at(int(at), path, with_parent=bool(parent))
