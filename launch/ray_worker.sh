#!/usr/bin/env bash
# Joins this machine to a Ray cluster whose head launch/ray_head.sh started.
#   launch/ray_worker.sh HOST:PORT [options of `ray start`, such as --num-cpus=4 or --block]
set -euo pipefail

head=${1:?usage: launch/ray_worker.sh HOST:PORT [options of ray start]}
shift
PATH="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin:$PATH"
export PATH RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
if [[ -z "${RAY_AUTH_TOKEN:-}" && ! -s ~/.ray/auth_token ]]; then
  echo "ray_worker.sh: copy ~/.ray/auth_token from the head's machine to this one first" >&2
  exit 2
fi
exec ray start --address="$head" "$@"
