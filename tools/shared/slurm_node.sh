#!/bin/bash
# srun runs this once on each node: it stages the data, then execs torchrun. submit.slr exports the variables used here.
# The arguments are torchrun's.
set -euo pipefail
: "${notes:?}" "${head_node:?}" "${store:?}" "${log:?}" # from submit.slr

# End the step on all nodes, which would wait for this one; exit with status $2.
give_up() {
  echo "slurm_node.sh: node $SLURMD_NODENAME $1" >&2
  scancel --signal=KILL "$SLURM_JOB_ID.$SLURM_STEP_ID" || true
  exit "$2"
}

touch "$notes/nodes/$SLURMD_NODENAME" || give_up "cannot write to $notes" 1
if [[ -n $STAGE_DATA ]]; then # FROM:TO
  from=${STAGE_DATA%%:*} to=${STAGE_DATA#*:} staged=0
  $LAUNCHER_PREFIX python -m tools.stage_data "$from" "$to" || staged=$?
  if ((staged)); then
    ((staged == 2)) || staged=3 # as train.py would exit without these data
    echo "$staged" >"$TRAIN_EXIT_STATUS_FILE" || true
    give_up "cannot copy $from to $to" "$staged"
  fi
  [[ $to != *%[aAj]* ]] || to=${to//\%/%%} # train.py would replace %a, %A and %j, and then also %%
  set -- "$@" --set "data_path=$to"
fi
[[ $SLURMD_NODENAME == "$head_node" ]] && is_host=true || is_host=false
exec $LAUNCHER_PREFIX python -m tools.torchrun "$log-$SLURMD_NODENAME.log" --local_addr="$SLURMD_NODENAME$HOST_SUFFIX" \
  --rdzv_conf="store_type=$store,is_host=$is_host,join_timeout=$JOIN_TIMEOUT,read_timeout=$JOIN_TIMEOUT" "$@"
