#!/usr/bin/env bash
# The default benchmark on this machine's GPU. usage: bench.sh OUT [SECONDS]; run again to go on.
# SECONDS ends each run, resumable, after so long: for machines that end a command after some minutes and would lose
# what it had still to print. 0 or none: no limit.
set -euo pipefail
out=${1:?usage: bench.sh OUT [SECONDS]} seconds=${2:-0}
export PYTHONPATH=${PYTHONPATH:-.} PYTHONUNBUFFERED=1
failed=()
try() { # WHAT COMMAND...: a failure is noted, and the rest is still measured
    local what=$1 code=0
    shift
    "$@" || code=$?
    [ "$code" -eq 0 ] || failed+=("$what: exit $code$([ "$code" -ne 124 ] || echo ', out of time: run again to go on')")
}
python3 -m pip install --quiet --no-build-isolation --no-deps -e . # for the entry points
for dtype in float32 bfloat16; do
    try "ssbench run, $dtype" timeout "$seconds" python3 -m specbench_ss run --methods ss,medusa --suite specbench \
        --dtype "$dtype" --device cuda --out "$out/$dtype" --resume
done
try vs_transformers.py python3 benchmarks/vs_transformers.py
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
