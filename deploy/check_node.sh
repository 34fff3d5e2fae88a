#!/bin/bash
# Slurm's Prolog, Epilog and HealthCheckProgram: check this node with the doctor. If a check fails, drain the node with
# the doctor's `fail` lines as the reason. Once all checks pass again, return a node that this script has drained; a
# node that somebody else drained stays drained. docs/bring_up_a_node.md says where to use it.
# Slurm runs it as root, so only root may write to the project's folder. In slurm.conf:
#   Prolog=/PROJECT/deploy/check_node.sh
#   Epilog=/PROJECT/deploy/check_node.sh
#   HealthCheckProgram=/PROJECT/deploy/check_node.sh
#   HealthCheckInterval=600
#   HealthCheckNodeState=IDLE                         # also idle nodes that are drained
#   BatchStartTimeout=180                             # longer than the prolog
#   SchedulerParameters=nohold_on_prolog_fail         # otherwise a job whose prolog fails is held after the requeue
set -uo pipefail

# Settings: edit them here, or export them in a script that ends with `exec .../check_node.sh "$@"`. Prolog, epilog and
# health check must have the same DOCTOR. This one checks neither the data nor whether the whole node is slow: replace
# quickstart by the configuration of your runs, and add --baseline=RECORD of a good node of the same kind.
DOCTOR=${DOCTOR:-.venv/bin/python -m tools.doctor --config=quickstart --dcgm=1 --run-dir=/tmp}
DOCTOR_SECONDS=${DOCTOR_SECONDS:-120}        # time limit
STAYS_DRAINED=${STAYS_DRAINED:-fingerprint}  # faults that come and go: a node drained for them waits for a human
TAG=check_node.sh:                           # begins the reason of a node that this script has drained

export PATH=${PATH:+$PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin # slurmd sets none
node=${SLURMD_NODENAME:-$(hostname -s)} role=${SLURM_SCRIPT_CONTEXT:-${1:-health}}
say() { logger -s -t check_node.sh -- "$node: $*" || true; }
if ! command -v scontrol >/dev/null; then
  say "there is no scontrol in $PATH, so this script cannot drain or return the node: add its folder to PATH here"
  [[ $role == prolog_slurmd ]] || exit 0 # a prolog can still keep the job away
fi
# Print the reason of a drained node; nothing if it is in service.
drain_reason() { scontrol --oneliner show node "$node" | sed -nE 's/.* State=[^ ]*DRAIN[^ ]* .* Reason=(.*)/\1/p'; }

if [[ $role == health ]]; then # slurmd waits for it, kills it after 60 s, and does not start while it fails
  [[ $(drain_reason) != "$TAG "* ]] || setsid --fork flock -n /run/check_node.lock "$0" mended </dev/null &>/dev/null
  exit 0
fi

cd "$(dirname "$(realpath "$0")")/.." || exit 0
# shellcheck disable=SC2086 # DOCTOR is a list of words
report=$(timeout --kill-after=10 "$DOCTOR_SECONDS" $DOCTOR 2>&1 </dev/null) && status=0 || status=$?
verdict=$(sed -nE 's/^(ok|warn|fail): [0-9]+ ok, .*/\1/p' <<<"$report" | tail -n 1)
reason=$(drain_reason)
case $status:$verdict in
2:fail)
  failed=$(sed -n 's/^fail  //p' <<<"$report" | tr -s ' ' | sed ':a;N;$!ba;s/\n/; /g')
  say "$failed"
  # a fault for which a node stays drained comes first, and replaces another reason that this script gave
  lasting=0
  [[ ! $failed =~ $STAYS_DRAINED ]] || lasting=1 failed="${BASH_REMATCH[0]}: $failed"
  if [[ -z $reason ]] || { ((lasting)) && [[ $reason == "$TAG "* && ! $reason =~ $STAYS_DRAINED ]]; }; then
    scontrol update NodeName="$node" State=DRAIN Reason="$TAG ${failed:0:300}" || say "could not drain this node"
  fi
  [[ $role != prolog_slurmd ]] || exit 1 # Slurm does not start the job here
  ;;
0:ok | 1:warn)
  if [[ $reason == "$TAG "* && ! $reason =~ $STAYS_DRAINED ]]; then
    scontrol update NodeName="$node" State=RESUME && say "passes again, was drained: $reason"
  fi
  ;;
*) say "the doctor could not check this node (status $status): $(tail -n 1 <<<"$report")" ;; # says nothing about it
esac
exit 0
