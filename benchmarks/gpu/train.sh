#!/usr/bin/env bash
# `ssbench train` on this machine's GPU: every trainer in bfloat16, and NF4 where bitsandbytes is there; what comes out
# decodes as its base. usage: train.sh OUT [SECONDS] [MODEL] [DATA]; run again to go on.
# SECONDS ends each training, resumable, after so long: for machines that end a command after some minutes and would
# lose what it had still to print. 0 or none: no limit. MODEL lab and generated conversations need no network.
set -euo pipefail
out=${1:?usage: train.sh OUT [SECONDS] [MODEL] [DATA]} seconds=${2:-0} model=${3:-lab} data=${4:-}
SSBENCH_CACHE=${SSBENCH_CACHE:-$out/cache}
. benchmarks/gpu/preamble.sh
chats=6000 steps=(--steps 300 --batch-size 16 --length 512 --save-every 50) few=(--limit 2)
[ -z "$TINY" ] || chats=8 steps=(--steps 2 --batch-size 1 --length 64) few=(--limit 1 --tasks qa --max-new-tokens 8)
train() { # NAME TRAINER OPTIONS...
    local name=$1 trainer=$2
    shift 2
    try "train $name" ssbench "$seconds" train "$trainer" --model "$model" --data "$data" --device "$DEVICE" \
        "${steps[@]}" --out "$out/$name" "$@"
}
run() { # NAME METHOD: greedy answers must be the base's, numerical ties of bfloat16 apart
    [ -f "$out/$1/config.json" ] || return 0
    try "run $1" ssbench "$seconds" run --model "$model" --methods "$2" --set "$2.weights=$out/$1" --suite specbench \
        "${few[@]}" --dtype "$DTYPE" --device "$DEVICE" --out "$out/run-$1" --resume
}
mkdir -p "$out"
if [ -z "$data" ]; then
    data=$out/chats.jsonl
    python3 -c "from pathlib import Path; from specbench_ss.reports.paper.training import write_conversations as write; write(Path('$data'), $chats)"
fi
train ss ss --dtype "$DTYPE" --gradient-checkpointing
run ss ss
train medusa medusa --dtype "$DTYPE"
run medusa medusa
train draft draft --dtype "$DTYPE" --distill
train ss-float32 ss --dtype float32
train shared ss --mode shared --dtype "$DTYPE" --segment "$([ -z "$TINY" ] && echo 128 || echo 32)" --gradient-checkpointing
if python3 -c 'import bitsandbytes' 2>/dev/null; then
    train ss-nf4 ss --load-in-4bit --dtype "$DTYPE" --segment 64
    run ss-nf4 ss
else
    echo "NF4 left out: no bitsandbytes"
fi
end
