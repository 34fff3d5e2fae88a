#!/bin/bash
# run.sh [ARGUMENTS OF PYTEST]: the tests that need a GPU, on a stand-in for CUDA (README.md). $PYTHON: default python.
# Exit status: pytest's; 77 where the stand-in cannot be built here.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec bash tests/cuda_stand_in/with.sh \
  "${PYTHON:-python}" -m pytest -p tests.cuda_stand_in.plugin -m "gpu and not slow" "$@"
