#!/usr/bin/env bash
# `ssbench train` on this machine's GPU: every trainer in bfloat16, and NF4 where bitsandbytes is there; what comes out
# decodes as its base. usage: train.sh OUT [SECONDS] [MODEL] [DATA]; run again to go on.
# SECONDS ends each training, resumable, after so long: for machines that end a command after some minutes and would
# lose what it had still to print. 0 or none: no limit. MODEL lab and generated conversations need no network.
set -euo pipefail
out=${1:?usage: train.sh OUT [SECONDS] [MODEL] [DATA]} seconds=${2:-0} model=${3:-lab} data=${4:-}
export PYTHONPATH=${PYTHONPATH:-.} PYTHONUNBUFFERED=1 SSBENCH_CACHE=${SSBENCH_CACHE:-$out/cache}
failed=()
try() { # WHAT COMMAND...: a failure is noted, and the rest is still tried
    local what=$1 code=0
    shift
    "$@" || code=$?
    [ "$code" -eq 0 ] || failed+=("$what: exit $code$([ "$code" -ne 124 ] || echo ', out of time: run again to go on')")
}
train() { # NAME TRAINER OPTIONS...
    local name=$1 trainer=$2
    shift 2
    try "train $name" timeout "$seconds" python3 -m specbench_ss train "$trainer" --model "$model" --data "$data" \
        --device cuda --steps 300 --batch-size 16 --length 512 --save-every 50 --out "$out/$name" "$@"
}
run() { # NAME METHOD: greedy answers must be the base's, near-ties of bfloat16 apart
    [ -f "$out/$1/config.json" ] || return 0
    try "run $1" timeout "$seconds" python3 -m specbench_ss run --model "$model" --methods "$2" \
        --set "$2.weights=$out/$1" --suite specbench --limit 2 --dtype bfloat16 --device cuda --out "$out/run-$1" --resume
}
mkdir -p "$out"
python3 -m pip install --quiet --no-build-isolation --no-deps -e . # for the entry points
python3 -c 'import torch, transformers; print(torch.cuda.get_device_name(), torch.__version__, transformers.__version__)'
if [ -z "$data" ]; then
    data=$out/chats.jsonl
    [ -f "$data" ] || python3 benchmarks/gpu/chats.py 6000 "$data"
fi
train ss ss --dtype bfloat16 --gradient-checkpointing
train ss-float32 ss --dtype float32
train medusa medusa --dtype bfloat16
train draft draft --dtype bfloat16 --distill
train shared ss --mode shared --dtype bfloat16 --segment 128 --gradient-checkpointing
if python3 -c 'import bitsandbytes' 2>/dev/null; then
    train ss-nf4 ss --load-in-4bit --dtype bfloat16 --segment 64
else
    echo "NF4 left out: no bitsandbytes"
fi
run ss ss
run medusa medusa
[ ! -f "$out/ss-nf4/config.json" ] || run ss-nf4 ss
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
