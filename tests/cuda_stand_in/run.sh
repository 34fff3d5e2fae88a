#!/bin/bash
# run.sh [ARGUMENTS OF PYTEST]: the tests that need a GPU, on a stand-in for CUDA (README.md). $PYTHON: default python.
# Exit status: pytest's; 77 where the stand-in cannot be built here.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
variables=$("$python" tests/cuda_stand_in/build.py "$folder") || exit 77
(
  eval "$variables"
  ulimit -S -v 80000000 # KiB: memory that a kernel would have written is never read, but may be printed
  "$python" -m pytest -p tests.cuda_stand_in.plugin -m "gpu and not slow" "$@"
)
