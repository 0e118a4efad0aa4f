"""`napkin doctor`."""

from dataclasses import asdict, dataclass

from napkin.cli.common.options import JsonOption, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import print_json, print_table, say

MARKS = {"fine": "ok", "lacking": "–", "broken": "BROKEN"}


@dataclass(frozen=True)
class DoctorOptions(JsonOption):
    """Say what this machine has and lacks: processor, memory, libraries, GPU, compiler, extras, calibration, caches.
    Each is tried. The status is 1 if something that napkin needs is broken, else 0; what is only lacking, such as a
    GPU, does not count."""


@command("doctor", DoctorOptions)
def main(options: DoctorOptions) -> int:
    with progress_line("examining this machine"):
        from napkin.hardware.doctor import examine

        findings = examine()
    broken = [finding for finding in findings if finding.state == "broken"]
    if options.json:
        print_json({"broken": bool(broken), "findings": [asdict(finding) for finding in findings]})
        return bool(broken)
    print_table((), [(MARKS[finding.state], finding.what, finding.found) for finding in findings])
    for finding in findings:
        if finding.remedy:
            say(f"{finding.what}: {finding.remedy}")
    say("broken: " + ", ".join(finding.what for finding in broken) if broken else "nothing that napkin needs is broken")
    return int(bool(broken))
