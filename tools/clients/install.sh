#!/usr/bin/env bash
# Install the harness clients that `make test-real` drives, pinned, into a folder of their own: install.sh DIR
# A client that cannot be installed is left out with a message; its tests then skip and say why.
# Measured on two cores: pi 28 s and 204 MB, Claude Code 8 s and 263 MB, Codex 13 s and 424 MB, qwen-code 6 s and 55 MB,
# opencode 11 s and 354 MB, mini-swe-agent 81 s and 754 MB (in a virtual environment of its own, DIR/mini: it pins much).
set -uo pipefail
dir=$(mkdir -p "$1" && cd "$1" && pwd)
[ -f "$dir/package.json" ] || echo '{"private": true}' > "$dir/package.json"
left_out() { echo "left out: $1 could not be installed${2:+ ($2)}" >&2; }

# qwen-code: the newest that runs on Node 20.
for client in @mariozechner/pi-coding-agent@0.73.1 @anthropic-ai/claude-code@2.1.220 @openai/codex@0.171.0 \
  @qwen-code/qwen-code@0.15.10 opencode-ai@1.18.33; do
  name=${client%@*}
  if [ -d "$dir/node_modules/$name" ]; then continue; fi
  npm install --prefix "$dir" --no-audit --no-fund --loglevel=error "$client" || left_out "$client" "it needs npm"
done

mini=mini-swe-agent==2.4.6
if [ ! -f "$dir/mini/.ready" ]; then
  { "${PYTHON:-python3}" -m venv "$dir/mini" && "$dir/mini/bin/pip" install -q "$mini" && touch "$dir/mini/.ready"; } \
    || { rm -rf "$dir/mini"; left_out "$mini" "it needs Python 3.10 or newer and its packages"; }
fi
exit 0
