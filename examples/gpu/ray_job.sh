#!/bin/bash
# UNVERIFIED: never submitted. A Ray cluster places the command on a node with four free GPUs; Gyre itself starts nothing
# through Ray, and all ranks run on that node. Stop it with `touch rl/stop`: the step under way is finished and saved.
set -euo pipefail
ray job submit --entrypoint-num-gpus 4 --entrypoint-num-cpus 32 --working-dir . -- \
  gyre train examples/gpu/train.toml "$@"
