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

# Make the folder $2, on this node's disk, equal to the folder $1. Jobs that start at once wait for each other.
stage() (
  mkdir -p "$(dirname "$2")" && exec 9>"$2.lock" && flock 9 || exit 3
  if [[ ! -e $2/.staged && -n $(ls -A "$2" 2>/dev/null) ]]; then # --delete must not empty a folder of the user's
    echo "$2 exists, but is no copy by this script; move it or name another folder" >&2
    exit 2
  fi
  # --chmod: else nobody could change the copy of a read-only folder
  mkdir -p "$2" && touch "$2/.staged" &&
    rsync --recursive --copy-links --times --chmod=u+w --delete --exclude=/.staged "$1/" "$2/" || exit 3
)

touch "$notes/nodes/$SLURMD_NODENAME" || give_up "cannot write to $notes" 1
if [[ -n $SUBMIT_STAGE ]]; then # FROM:TO
  from=${SUBMIT_STAGE%%:*} to=${SUBMIT_STAGE#*:} to=${to%/} staged=0
  stage "$from" "$to" || staged=$?
  if ((staged)); then # 3, as train.py would exit without these data
    echo "$staged" >"$TRAIN_EXIT_STATUS_FILE" || true
    give_up "cannot copy $from to $to" "$staged"
  fi
  [[ $to != *%[aAj]* ]] || to=${to//\%/%%} # train.py would replace %a, %A and %j, and then also %%
  set -- "$@" --set "data_path=$to"
fi
[[ $SLURMD_NODENAME == "$head_node" ]] && is_host=true || is_host=false
join="join_timeout=$SUBMIT_JOIN_TIMEOUT,read_timeout=$SUBMIT_JOIN_TIMEOUT"
exec $SUBMIT_PREFIX python -m tools.torchrun "$log-$SLURMD_NODENAME.log" \
  --local_addr="$SLURMD_NODENAME$SUBMIT_HOST_SUFFIX" --rdzv_conf="store_type=$store,is_host=$is_host,$join" "$@"
