"""Draw the decode rows of results that are written already, as ``quire bench decode --plots`` does for its own.

    python benchmarks/plot.py benchmarks/results/h200_rivals.json --out benchmarks/results/plots/rivals

Rows of files that differ in device or quantisation do not belong into one plot; nothing keeps you from it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from quire.graph_runner.bench.plots import draw


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", metavar="FILE.json")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    written = draw([row for path in args.results for row in json.loads(path.read_text())["rows"]], args.out)
    if not written:
        print("no measured rows of the workload decode in these files", file=sys.stderr)
        return 1
    for path in written:
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
