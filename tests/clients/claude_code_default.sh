#!/bin/sh
# Claude Code without the name of a model: with its default model it states its effort in messages of the system.
base_url=$1 key=$2 task=$4

export ANTHROPIC_BASE_URL="$base_url" ANTHROPIC_API_KEY="$key"
export CLAUDE_CODE_ATTRIBUTION_HEADER=0 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
claude -p "$task" --permission-mode acceptEdits --allowedTools Bash Edit Read < /dev/null
