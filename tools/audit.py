"""Ask pip-audit for known vulnerabilities of constraints.txt, and take no answer for what it is: no answer.

    make audit                 # exit 0: all looked up, none known; 1: some known; 3: not all could be looked up

pip-audit itself exits with 0 where its database does not know a single package, as behind a mirror of the index.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KNOWN, NOT_ASKED = 1, 3
SECONDS = 300


def main() -> int:
    parser = argparse.ArgumentParser(description="known vulnerabilities of the pinned packages")
    parser.add_argument("--pip-audit", default="pip-audit", help="the pip-audit to call")
    lines, code = verdict(*answer(parser.parse_args().pip_audit))
    print("\n".join(lines))
    return code


def answer(program: str) -> tuple[list[dict[str, Any]], str]:
    """What pip-audit says of each package, and what it complained about."""
    command = [program, "--disable-pip", "--no-deps", "--format", "json", "--progress-spinner", "off"]
    try:
        done = subprocess.run(
            [*command, "-r", str(ROOT / "constraints.txt")], capture_output=True, encoding="utf-8", timeout=SECONDS
        )
        return json.loads(done.stdout)["dependencies"], ""
    except subprocess.TimeoutExpired:
        return [], f"no answer within {SECONDS} s"
    except ValueError:
        return [], done.stderr.strip().rpartition("\n")[2]


def verdict(packages: list[dict[str, Any]], complaint: str) -> tuple[list[str], int]:
    """Lines to print, and the exit code. packages: as under `dependencies` of pip-audit's JSON."""
    known = [
        f"{one['name']} {one['version']}: {hole['id']}, fixed in {', '.join(hole['fix_versions']) or 'no version yet'}"
        for one in packages
        for hole in one.get("vulns", ())
    ]
    skipped = sum("skip_reason" in one for one in packages)
    if known:
        return known, KNOWN
    if skipped or not packages:
        count = f"{skipped} of {len(packages)} packages" if packages else f"the packages ({complaint})"
        return [f"the database of vulnerabilities gave no answer about {count}: nothing is known of them"], NOT_ASKED
    return [f"{len(packages)} packages, no known vulnerability"], 0


if __name__ == "__main__":
    sys.exit(main())
