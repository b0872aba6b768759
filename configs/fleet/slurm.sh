#!/bin/bash
# Workers of a fleet on Slurm: one to a node, as many as the array has elements.
#
#   sbatch configs/fleet/slurm.sh                       # eight nodes, eight hours
#   sbatch --array=1-100%20 --time=02:00:00 configs/fleet/slurm.sh
#
# Before: `pip install 'autofuse[fleet]'` into an environment that all nodes see, and the server's URL in a file that only
# you can read: ~/.config/autofuse/fleet-url, one line, or another one in FLEET_URL_FILE. Let a partition or constraint
# choose nodes with the same processor as those whose scripts ask: others find nothing to do.
#SBATCH --job-name=autofuse-fleet
#SBATCH --array=1-8
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --exclusive
#SBATCH --time=08:00:00
#SBATCH --signal=B:TERM@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=autofuse-fleet-%A_%a.log

set -euo pipefail
umask 077

url_file=${FLEET_URL_FILE:-$HOME/.config/autofuse/fleet-url}
if [ ! -r "$url_file" ]; then
  echo "expected the fleet's URL in $url_file, found no file that can be read; docs/guides/fleet.md" >&2
  exit 2
fi
AUTOFUSE_FLEET_URL=$(<"$url_file")
export AUTOFUSE_FLEET_URL

# A store of this task's own, on the node's disk: what it finds is on the server when the task ends.
folder=$(mktemp -d "${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/autofuse-XXXXXXXX")
export AUTOFUSE_STORE="$folder/store.sqlite3"

worker=
# Slurm asks a minute before the time is over, and where it takes the node away: the lease is given back.
trap '[ -z "$worker" ] || kill -TERM "$worker" 2>/dev/null || true' TERM INT
trap 'rm -rf -- "$folder"' EXIT

"${AUTOFUSE:-autofuse}" daemon serve --fleet-worker &
worker=$!
# A signal that is trapped ends `wait` early; the second one gets the worker's status.
status=0
wait "$worker" || status=$?
while kill -0 "$worker" 2>/dev/null; do
  status=0
  wait "$worker" || status=$?
done
exit "$status"
