#!/bin/sh
# The API with curl alone: ready?, an answer, a streamed one.
set -eu
url=${SERVELITE_URL:-http://127.0.0.1:8000}

curl -fsS "$url/health/ready"
echo

curl -fsS "$url/v1/chat/completions" -H 'Content-Type: application/json' -d '{
  "model": "demo", "temperature": 0,
  "messages": [{"role": "user", "content": "What is the capital of France?"}]}'
echo

# -N shows each event as it comes. With --api-key: -H "Authorization: Bearer $KEY"
curl -fsSN "$url/v1/completions" -H 'Content-Type: application/json' -d '{
  "model": "demo", "temperature": 0, "max_tokens": 4, "stream": true,
  "prompt": "The capital of France is"}'
