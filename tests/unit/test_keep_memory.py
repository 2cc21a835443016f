"""A process that keeps its memory has no page fault for the tensors of the next step."""

import platform
import subprocess
import sys

import pytest

CODE = """
import ctypes, resource, sys
from gyre_train.memory import keep_memory
PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # a kernel that gives huge pages unasked faults once in 2 MB
if sys.argv[1] == "keep":
    assert keep_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    one, two = b"1" * (48 << 20), b"2" * (40 << 20)
    del one, two
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_large_arrays_come_from_kept_memory() -> None:
    faults = {
        how: int(subprocess.run([sys.executable, "-c", CODE, how], check=True, capture_output=True, text=True).stdout)
        for how in ("keep", "give back")
    }
    assert faults["keep"] < 100 < 1000 < faults["give back"]
