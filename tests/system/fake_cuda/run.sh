#!/bin/bash
# run.sh [PYTEST ARGUMENTS]: run the GPU tests on a fake CUDA runtime (README.md). $PYTHON: default python.
# Exit status: pytest's, or build.py's if the fake runtime cannot be built.
set -euo pipefail
cd "$(dirname "$0")/../../.."
exec bash tests/system/fake_cuda/with.sh \
  "${PYTHON:-python}" -m pytest -p tests.system.fake_cuda.plugin -m "gpu and not slow" "$@"
