"""Add up what ran: tests from the pytest reports, and each nox session without tests as one check.

`python .ci/count.py .nox/reports` prints the closing line of `.ci/run`.
"""

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path


def main(folder: Path) -> int:
    """Print what passed and failed by the reports in a folder; return 1 when anything failed or nothing ran."""
    passed = failed = skipped = 0
    for file in sorted(folder.glob("*.xml")):
        for suite in ET.parse(file).getroot().iter("testsuite"):
            total, bad, skip = (
                sum(int(suite.get(k, 0)) for k in keys) for keys in (["tests"], ["failures", "errors"], ["skipped"])
            )
            passed, failed, skipped = passed + total - bad - skip, failed + bad, skipped + skip
    report = folder / "sessions.json"
    sessions = json.loads(report.read_text())["sessions"] if report.exists() else []
    for session in sessions:
        good = session["result"] == "success"
        if not session["name"].startswith("tests"):
            passed, failed = passed + good, failed + (not good)
        elif not good and failed == 0:
            failed += 1  # the session broke before or after its tests
        if not good:
            print(
                f"failed: nox -s {session['signatures'][0]!r}"
                if session.get("signatures")
                else f"failed: {session['name']}"
            )
    if not sessions or passed == 0:
        failed += 1
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
