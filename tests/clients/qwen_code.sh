#!/bin/sh
# qwen-code.
base_url=$1 key=$2 model=$3 task=$4

export OPENAI_BASE_URL="$base_url" OPENAI_API_KEY="$key" OPENAI_MODEL="$model"
qwen --auth-type openai --yolo -p "$task" < /dev/null
