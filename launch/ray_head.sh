#!/usr/bin/env bash
# Starts the head of a Ray cluster on this machine.
#   launch/ray_head.sh [PORT] [options of `ray start`, such as --num-cpus=4 or --block]
# Then: launch/ray_worker.sh HOST:PORT on the other machines, and on any one of them
#       hybridflow train RECIPE --address HOST:PORT
# Whoever reaches Ray's ports may run code, so a token guards them: it is made here, in
# ~/.ray/auth_token, which every machine of the cluster needs. `ray stop` ends the node.
set -euo pipefail

port=6379
if [[ "${1:-}" =~ ^[0-9]+$ ]]; then
  port=$1
  shift
fi
PATH="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin:$PATH"
export PATH RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
if [[ -z "${RAY_AUTH_TOKEN:-}" && ! -s ~/.ray/auth_token ]]; then
  ray get-auth-token --generate > /dev/null
fi
exec ray start --head --port="$port" --include-dashboard=false "$@"
