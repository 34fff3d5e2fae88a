#!/bin/bash
# run.sh [ARGUMENTS OF PYTEST]: the tests that need a GPU, on a fake CUDA runtime (README.md). $PYTHON: default python.
# Exit status: pytest's; 77 where the fake runtime cannot be built here.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec bash tests/fake_cuda/with.sh \
  "${PYTHON:-python}" -m pytest -p tests.fake_cuda.plugin -m "gpu and not slow" "$@"
