#!/usr/bin/env bash
# The default benchmark on this machine's GPU. usage: bench.sh OUT [SECONDS]; run again to go on.
# SECONDS ends each run, resumable, after so long: for machines that end a command after some minutes and would lose
# what it had still to print. 0 or none: no limit.
set -euo pipefail
out=${1:?usage: bench.sh OUT [SECONDS]} seconds=${2:-0}
. benchmarks/gpu/preamble.sh
few=() small=()
[ -z "$TINY" ] || few=(--limit 1 --tasks qa --max-new-tokens 8) small=(--prompts 1 --new 8 --repeats 1 --lengths 4)
for dtype in float32 "$DTYPE"; do
    try "ssbench run, $dtype" ssbench "$seconds" run --methods ss,medusa --suite specbench --dtype "$dtype" \
        --device "$DEVICE" "${few[@]}" --out "$out/$dtype" --resume
done
try vs_transformers.py limited "$seconds" python3 benchmarks/vs_transformers.py --device "$DEVICE" "${small[@]}"
end
