#!/usr/bin/env bash
# Install Debian's Chromium with its driver, and selenium, for the tests marked `browser`. Needs root or sudo.
set -euo pipefail
cd "$(dirname "$0")/../../.."
as_root=$([ "$(id -u)" = 0 ] || echo sudo)
$as_root apt-get update -q
$as_root apt-get install -y -q --no-install-recommends chromium chromium-driver
python=.venv/bin/python
[ -x "$python" ] || python=python3
"$python" -m pip install -q -c constraints.txt ".[browser]"
