#!/bin/sh
# Two turns of Claude Code with one tool: claude_twice.sh PROMPT
set -eu
export TERM=dumb IS_SANDBOX=1 ANTHROPIC_MODEL=gyre-policy CLAUDE_CODE_MAX_OUTPUT_TOKENS=96 CLAUDE_CODE_MAX_RETRIES=2
export DISABLE_TELEMETRY=1 DISABLE_ERROR_REPORTING=1 DISABLE_AUTOUPDATER=1 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
export CLAUDE_CODE_ATTRIBUTION_HEADER=0
claude -p "$1" --tools Bash --dangerously-skip-permissions --output-format json
claude -p "Once more, please." --continue --tools Bash --dangerously-skip-permissions --output-format json
