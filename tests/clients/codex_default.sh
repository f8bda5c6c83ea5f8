#!/bin/sh
# Codex without the name of a model: its default model has its tools in the input, most of them behind free-form JavaScript.
base_url=$1 key=$2 task=$4

export FOREBAY_SESSION_KEY="$key"
codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox \
  -c model_provider=forebay \
  -c model_providers.forebay.name=forebay \
  -c model_providers.forebay.base_url="$base_url" \
  -c model_providers.forebay.env_key=FOREBAY_SESSION_KEY \
  "$task" < /dev/null
