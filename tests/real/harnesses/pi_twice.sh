#!/bin/sh
# Two turns of pi: pi_twice.sh WIRE PROMPT, where WIRE is openai-completions, openai-responses or anthropic-messages.
set -eu
case $1 in anthropic-messages) base=$GYRE_BASE_URL ;; *) base="$GYRE_BASE_URL/v1" ;; esac
mkdir -p "$HOME/.pi/agent"
cat > "$HOME/.pi/agent/models.json" <<JSON
{"providers": {"gyre": {"baseUrl": "$base", "api": "$1", "apiKey": "$GYRE_KEY", "models": [{"id": "policy", "name": "p",
 "reasoning": true, "input": ["text"], "contextWindow": 65536, "maxTokens": 96,
 "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}}]}}}
JSON
export PI_OFFLINE=1 PI_TELEMETRY=0 TERM=dumb
pi --provider gyre --model policy -p "$2"
pi --provider gyre --model policy -c -p "Once more, please."
