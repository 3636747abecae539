#!/usr/bin/env bash
# The benchmarks on this machine's accelerator, small sizes: under 8 minutes. Each prints its own table.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python -c 'import jax; d = jax.devices()[0]; print(d.device_kind); assert d.platform != "cpu", "no accelerator is seen by jax"'
run() { printf '\n== %s\n' "$*"; timeout 150 python "benchmarks/$1.py" "${@:2}" || echo "(did not end in time, or failed)"; }
run fingerprint --quick --gpu
run memory --quick --gpu
run watch --quick
run overhead --quick --gpu
run compile --quick --gpu
