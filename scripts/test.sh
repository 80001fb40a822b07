#!/usr/bin/env bash
# Installs what is missing, builds, runs every test. Arguments go to ctest: scripts/test.sh -L quick
set -euo pipefail
cd "$(dirname "$0")/.."
export HOME=${HOME:-~}

scripts/deps.sh
cmake --preset release
cmake --build --preset release -j "$(nproc)"
ctest --preset release --output-on-failure --no-tests=error -j 2 "$@"
