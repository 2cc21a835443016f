"""What planning, packing and choosing an attention load: no torch, so that `--dry-run` is instant."""

import subprocess
import sys


def test_planning_loads_no_torch() -> None:
    code = "import sys, gyre_train.plan, gyre_train.attn.api; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
