#!/bin/sh
# Claude Code. Its base URL ends before /v1.
base_url=$1 key=$2 model=$3 task=$4

export ANTHROPIC_BASE_URL="$base_url" ANTHROPIC_API_KEY="$key" ANTHROPIC_MODEL="$model"
export ANTHROPIC_DEFAULT_HAIKU_MODEL="$model"
export CLAUDE_CODE_ATTRIBUTION_HEADER=0 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
claude -p "$task" --permission-mode acceptEdits --allowedTools Bash Edit Read < /dev/null
