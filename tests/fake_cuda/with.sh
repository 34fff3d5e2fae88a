#!/bin/bash
# with.sh [--compute] COMMAND...: any command on the fake CUDA runtime (README.md). --compute: what its Python processes
# launch is computed too. $PYTHON: default python. Exit status: the command's; 77 where it cannot be built here.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
variables=$("${PYTHON:-python}" "$here/build.py" "$folder") || exit 77
(
  if [ "${1:-}" = --compute ]; then
    shift
    export PYTHONPATH=$here/site:$here/../..${PYTHONPATH:+:$PYTHONPATH} PYTEST_PLUGINS=tests.fake_cuda.plugin
  fi
  eval "$variables"
  ulimit -S -v 80000000 # KiB: memory that a kernel would have written is never read, but may be printed
  "$@"
)
