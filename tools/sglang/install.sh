#!/usr/bin/env bash
# Make the environment that real SGLang runs in on a CPU: tools/sglang/install.sh VENV
# It is apart from the project's own environment because SGLang pins another transformers. Safe to run again.
set -euo pipefail
if [ $# -ne 1 ]; then echo "usage: tools/sglang/install.sh VENV (the folder to make), got $# arguments" >&2; exit 2; fi
here=$(cd "$(dirname "$0")" && pwd); venv=$1; python=${PYTHON:-python3}
[ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
rm -f "$venv/.ready"
pip() { "$venv/bin/python" -m pip install --disable-pip-version-check -q "$@"; }

# torch first, so that nothing below picks another build of it; sglang without its dependencies, which name the GPU stack.
pip torch==2.13.0 numpy
pip --no-deps sglang==0.5.23
# pip then lists the GPU packages that are missing: they are left out on purpose.
pip -r "$here/requirements.txt" torch==2.13.0

site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp "$here/sgl_cpu_stubs.py" "$site/sgl_cpu_stubs.py"
echo "import sgl_cpu_stubs" > "$site/zz_sgl_cpu_stubs.pth"
HF_HUB_OFFLINE=1 "$venv/bin/python" -c 'import sglang, torch; assert torch.__version__.startswith("2.13.0"), torch.__version__'
touch "$venv/.ready"
