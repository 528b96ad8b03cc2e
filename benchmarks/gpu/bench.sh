#!/usr/bin/env bash
# The default benchmark on this machine's GPU. usage: bench.sh OUT; run again to go on.
set -euo pipefail
out=${1:?usage: bench.sh OUT}
export PYTHONPATH=${PYTHONPATH:-.} PYTHONUNBUFFERED=1
python3 -m pip install --quiet --no-build-isolation --no-deps -e . # for the entry points
for dtype in float32 bfloat16; do
    timeout 200 python3 -m specbench_ss run --methods ss,medusa --suite specbench --dtype "$dtype" \
        --device cuda --out "$out/$dtype" --resume || true
done
python3 benchmarks/vs_transformers.py
