#!/usr/bin/env bash
# One process per machine under torchrun: each starts a Ray node, rank 0 also runs the driver.
#   torchrun --nnodes 2 --nproc-per-node 1 --node-rank R --master-addr HOST --master-port 29500 \
#     --no-python launch/torchrun.sh RECIPE [key=value ...]
# Ray listens on the port after the master's. When the driver ends, so do the nodes.
set -euo pipefail

: "${RANK:?RANK, MASTER_ADDR and MASTER_PORT come from torchrun}"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PATH="$here/../.venv/bin:$PATH"
port=$((MASTER_PORT + 1))
if [[ "$RANK" != 0 ]]; then
  # The token file may still be on its way through the shared home.
  for _ in {1..60}; do [[ -n "${RAY_AUTH_TOKEN:-}" || -s ~/.ray/auth_token ]] && break; sleep 1; done
  "$here/ray_worker.sh" "$MASTER_ADDR:$port" --block || echo "rank $RANK: its Ray node has ended"
  exit 0
fi
"$here/ray_head.sh" "$port" --block &
node=$!
trap 'kill "$node"; wait "$node" || true' EXIT
hybridflow train "$@" --address "$MASTER_ADDR:$port"
