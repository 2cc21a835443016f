"""Speed of the scheduler: no policy or simulator stands yet, so there is nothing to measure and no bound to miss.

Run: python benchmarks/scheduler.py [--quick] [--json].
"""

from __future__ import annotations

import argparse
import json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.json:
        print(json.dumps({"benchmark": "scheduler", "quick": options.quick, "figures": {}, "missed": []}, indent=1))
    else:
        print("scheduler: nothing to measure yet")


if __name__ == "__main__":
    main()
