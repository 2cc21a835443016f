#!/bin/sh
# Two turns of Codex: codex_twice.sh PROMPT
set -eu
mkdir -p "$HOME/.codex"
cat > "$HOME/.codex/config.toml" <<TOML
model = "policy"
model_provider = "gyre"
model_context_window = 65536
web_search = "disabled"
[model_providers.gyre]
name = "Gyre"
base_url = "$GYRE_BASE_URL/v1"
env_key = "GYRE_KEY"
wire_api = "responses"
TOML
codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "$1"
codex exec resume --last --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "Once more, please."
