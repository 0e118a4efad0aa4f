"""`python -m napkin.distributed.launch` is `torchrun`, which reports a lost rank in one line instead of a traceback.

It takes torchrun's options. It exits with the status of the rank that failed first, 128 + n after signal n, and
forwards the signals that clusters send before a time limit, for which torchrun itself would end and leave its ranks
behind.
"""

import logging
import sys
from collections.abc import Sequence

FORWARDED = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2,SIGXCPU"


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks, wait for them and return the exit status."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Every closing signal that is sent to a rank, and every failure with its pid, would be a line of its own.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        run.main(["--signals-to-handle", FORWARDED, *(sys.argv[1:] if arguments is None else arguments)])
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        # A rank that was killed is the cause, even if the others have noticed before the launcher has.
        killed = [each for each in error.failures.items() if each[1].exitcode < 0]
        rank, failure = killed[0] if killed else error.get_first_failure()
        if not killed:
            # The rank has said why.
            return failure.exitcode
        line = f"launch: rank {rank} (process {failure.pid}) was ended by {failure.signal_name()}"
        sys.stderr.write(f"{line}; continue from the newest checkpoint with `napkin resume`\n")
        return 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main())
