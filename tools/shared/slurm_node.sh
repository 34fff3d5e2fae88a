#!/bin/bash
# srun runs this once on each node: it stages the data, then execs torchrun. submit.slr exports the variables used here.
# The arguments are torchrun's.
set -euo pipefail
: "${notes:?}" "${head_node:?}" "${store:?}" "${log:?}" # from submit.slr

touch "$notes/nodes/$SLURMD_NODENAME" || {
  echo "slurm_node.sh: node $SLURMD_NODENAME cannot write to $notes" >&2
  scancel --signal=KILL "$SLURM_JOB_ID.$SLURM_STEP_ID" # the other nodes would wait for this one
  exit 1
}
if [[ -n $STAGE_DATA ]]; then # FROM:TO
  $LAUNCHER_PREFIX python -m tools.stage_data "${STAGE_DATA%%:*}" "${STAGE_DATA#*:}"
  set -- "$@" --set "data_path=${STAGE_DATA#*:}"
fi
[[ $SLURMD_NODENAME == "$head_node" ]] && is_host=true || is_host=false
exec $LAUNCHER_PREFIX python -m tools.torchrun "$log-$SLURMD_NODENAME.log" --local_addr="$SLURMD_NODENAME$HOST_SUFFIX" \
  --rdzv_conf="store_type=$store,is_host=$is_host,join_timeout=$JOIN_TIMEOUT,read_timeout=$JOIN_TIMEOUT" "$@"
