#!/bin/sh
# opencode, with a provider of its own.
base_url=$1 key=$2 model=$3 task=$4

export OPENCODE_CONFIG_CONTENT='{
  "provider": {"forebay": {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "'"$base_url"'", "apiKey": "'"$key"'"},
    "models": {"'"$model"'": {"limit": {"context": 131072, "output": 16384}}}
  }},
  "permission": {"edit": "allow", "bash": "allow"}
}'
opencode run --title task --model "forebay/$model" "$task" < /dev/null
