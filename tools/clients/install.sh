#!/usr/bin/env bash
# Install the harness clients that `make test-real` drives, pinned, into a folder of their own: install.sh DIR
# A client that cannot be installed is left out with a message; its tests then skip and say why.
set -uo pipefail
dir=$(mkdir -p "$1" && cd "$1" && pwd)
[ -f "$dir/package.json" ] || echo '{"private": true}' > "$dir/package.json"
for client in @mariozechner/pi-coding-agent@0.73.1 @anthropic-ai/claude-code@2.1.220; do
  name=${client%@*}
  if [ -d "$dir/node_modules/$name" ]; then continue; fi
  npm install --prefix "$dir" --no-audit --no-fund --loglevel=error "$client" || echo "left out: $client could not be installed" >&2
done
exit 0
