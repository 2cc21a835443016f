"""Start real SGLang on the CPU: tools/sglang/serve.py VENV MODEL_DIR PORT [FLAG ...]

The process becomes the server (exec), so whoever started it stops it with SIGTERM. Extra flags go to SGLang as they are
and win over these. `--sleep-on-idle` keeps an idle server from burning a core.
"""

import os
import sys

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "all",
    "HF_HUB_OFFLINE": "1",
}
FLAGS = (
    *("--device", "cpu", "--host", "127.0.0.1", "--dtype", "float32"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--mem-fraction-static", "0.1", "--max-total-tokens", "140000"),
    *("--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle"),
)


def command(venv, model_dir, port, extra=()):
    """The command line that serves `model_dir` on `port`."""
    python = os.path.join(venv, "bin", "python")
    return [python, "-m", "sglang.launch_server", "--model-path", model_dir, "--port", str(port), *FLAGS, *extra]


def main():
    if len(sys.argv) < 4:
        sys.exit(f"usage: tools/sglang/serve.py VENV MODEL_DIR PORT [FLAG ...], got {len(sys.argv) - 1} arguments")
    venv, model_dir, port, *extra = sys.argv[1:]
    if not os.path.exists(os.path.join(venv, ".ready")):
        sys.exit(f"{venv} is not a finished SGLang environment; make it first: tools/sglang/install.sh {venv}")
    arguments = command(venv, model_dir, port, extra)
    os.execve(arguments[0], arguments, {**os.environ, **ENVIRONMENT})


if __name__ == "__main__":
    main()
