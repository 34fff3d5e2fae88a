#!/usr/bin/env bash
# Accept a GPU node: the doctor, the tests that need a GPU, the ladder and one training to an accuracy.
#
#   deploy/gpu_acceptance.sh OUT                                         # the first node of a kind
#   BASELINE=FIRST/ladder/ladder.json deploy/gpu_acceptance.sh OUT       # fails if a rung is slower than on that node
#   SET=--set=data_path=/data RECORD="--config=accuracy --seeds=1" deploy/gpu_acceptance.sh OUT
#
# Each step writes its output to OUT/STEP/, the doctor its records to OUT/. The same command continues after an
# interruption: it repeats only steps that have not passed; to repeat all of them, name a new OUT. Exit status: 0 all steps passed, 1 a step failed, 2 no OUT, 130 interrupted.
set -uo pipefail
set -m # each step is a process group, which `interrupt` ends

[ $# = 1 ] && [ -n "$1" ] || { echo "usage: $0 OUT" >&2 && exit 2; }
mkdir -p "$1" && out=$(realpath "$1") || exit 2
cd "$(dirname "$(realpath "$0")")/.." || exit 2

# Options of each step, and of all of them; one word contains no space.
PYTHON=${PYTHON:-python}
GPUS=${GPUS:-$("$PYTHON" -c "import torch; print(torch.cuda.device_count())")}
SET="--set=device=cuda ${SET:-}"                   # such as --set=data_path=/data; not for the tests
DOCTOR=${DOCTOR:---config=record-75}
TESTS=${TESTS:--m gpu}
LADDER=${LADDER:-}
BASELINE=${BASELINE:+--baseline=$(realpath "${BASELINE:-}")} # the ladder.json of an accepted node
RECORD=${RECORD:---config=record-75 --seeds=1}

failed=()

# step NAME COMMAND...: run the command in the background, so that a signal ends it at once. Its output is in
# OUT/NAME/output.txt. OUT/NAME/passed holds the command that has passed; another command runs again.
step() {
  local name=$1 folder=$out/$1 begun=$SECONDS
  shift
  if [ "$(cat "$folder/passed" 2>/dev/null)" = "$*" ]; then
    echo "$name: passed before"
    return
  fi
  mkdir -p "$folder"
  echo "$name: $*"
  "$@" >"$folder/output.txt" 2>&1 </dev/null &
  if wait $!; then
    echo "$*" >"$folder/passed"
    echo "$name: passed after $((SECONDS - begun)) s"
  else
    echo "$name: FAILED after $((SECONDS - begun)) s: $(tail -n 1 "$folder/output.txt")"
    failed+=("$name")
  fi
}

interrupt() {
  trap '' INT TERM
  while kill -- "-$!" 2>/dev/null; do sleep 1; done # until all of the step's processes have ended
  echo "interrupted: the same command continues"
  exit 130
}
trap interrupt INT TERM

# check FILE COMMAND...: run the doctor and keep its record. Its warnings pass. Under torchrun its exit status is lost.
check() {
  "${@:2}" --json >"$1"
  grep -E '"worst": "(ok|warn)"' "$1" && return
  echo "$1: $(grep -E '^(fail  |error: )' "$folder/output.txt" | tr -s ' ' | paste -sd ';')"
  return 1
}

# some_passed COMMAND...: run the tests. pytest succeeds also if all are skipped, as without a usable GPU.
some_passed() { "$@" && tail -n 1 "$folder/output.txt" | grep ' passed'; }

# shellcheck disable=SC2086 # the options are lists of words
{
  step doctor check "$out/doctor.json" "$PYTHON" -m tools.doctor --run-dir="$out" $DOCTOR $SET
  if [ "$GPUS" -gt 1 ]; then
    step ranks check "$out/ranks.json" \
      "$PYTHON" -m torch.distributed.run --nproc_per_node="$GPUS" -m tools.doctor --run-dir="$out" $DOCTOR $SET
  fi
  step tests some_passed "$PYTHON" -m pytest $TESTS
  step ladder "$PYTHON" -m tools.bench ladder --json="$out/ladder/ladder.json" $LADDER $BASELINE $SET
  step record "$PYTHON" -m tools.bench record --out="$out/record" $RECORD $SET
}

[ ${#failed[@]} = 0 ] && echo "passed: every step" && exit 0
echo "failed: ${failed[*]}; their output: $out/STEP/output.txt"
exit 1
