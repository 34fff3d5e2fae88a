#!/bin/bash
# with.sh [--compute] COMMAND...: run a command on the fake CUDA runtime (README.md). --compute: its Python processes
# also compute results. $PYTHON: default python. Exit status: the command's, or build.py's if it fails.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
variables=$("${PYTHON:-python}" "$here/build.py" "$folder")
(
  if [ "${1:-}" = --compute ]; then
    shift
    export PYTHONPATH=$here/site:$here/../../..${PYTHONPATH:+:$PYTHONPATH} PYTEST_PLUGINS=tests.system.fake_cuda.plugin
  fi
  eval "$variables"
  ulimit -S -v 80000000 # KiB, since garbage in memory that no kernel has written may be taken for a size
  "$@"
)
