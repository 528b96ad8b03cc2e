#!/usr/bin/env bash
# All that needs a GPU, the most valuable first, in stages of under ten minutes. usage: all.sh OUT [STAGE...]
# README.md in this folder describes each stage and its output. All output is in WORK (runs/gpu), of each stage in
# WORK/results/STAGE, and is continued. After every stage, interrupted or not, OUT gets STAGE.tar.gz with the results, and
# traces.tar. A stage starts from FROM/STAGE.tar.gz (runs/from) if WORK has nothing of it. Failed stages are listed at the
# end; the others run anyway.
# LIMIT: seconds of a stage. ENGINES: in this order. LAB_SCALE: share of the larger lab's budget, one WORK for one share.
set -uo pipefail
out=${1:?usage: all.sh OUT [STAGE...]}
shift
known=(output_match telemetry figure17 roofline generate train contexts batches lab larger)
stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=("${known[@]}")
for stage in "${stages[@]}"; do
    [[ " ${known[*]} " == *" $stage "* ]] || { echo "no stage $stage; stages: ${known[*]}" >&2; exit 2; }
done
. benchmarks/gpu/preamble.sh
limit=${LIMIT:-540}
if [ "$DEVICE" = cpu ]; then engines=(${ENGINES:-eager}); else engines=(${ENGINES:-graph eager}); fi
half=$((limit / ${#engines[@]}))
results=$WORK/results most=$((15 << 20)) # bytes of a file that is given back

small() { # WORDS TINY_WORDS: the ones, or the others where TINY is set; to be split into words
    if [ -z "$TINY" ]; then echo "$1"; else echo "$2"; fi
}
both() { # COMMAND...: with each engine as its last argument, replayed first
    local code=0 engine
    for engine in "${engines[@]}"; do
        "$@" "$engine" || code=1
    done
    return $code
}
calibrated() { # the machine's limits, measured once, for all that counts against them
    [ -f "$WORK/calibrated" ] || { ssbench 120 doctor --calibrate --device "$DEVICE" && touch "$WORK/calibrated"; }
}

# shellcheck disable=SC2046 # words are to be split
output_match() { # every lossless method against `ar`, float32 and bfloat16, with CUDA graphs and eager
    local by="graph eager"
    [ "$DEVICE" != cpu ] || by="called eager"
    limited "$limit" python3 benchmarks/gpu/output_match.py --device "$DEVICE" --engines $by \
        --out "$results/output_match/output_match.jsonl" $(small "" "--prompts 1 --tasks 1 --new 8")
}
telemetry() { # all methods of the lab, with what the GPU did
    calibrated || echo "the machine's limits are not measured: shares of its bandwidth are left out" >&2
    both all_methods lab "$results/telemetry/lab"
}
# shellcheck disable=SC2046
all_methods() { # MODEL FOLDER ENGINE
    ssbench "$half" run --model "$1" --methods all --suite specbench --device "$DEVICE" --engine "$3" --dtype "$DTYPE" \
        $(small "--limit 2" "--limit 1 --tasks qa --max-new-tokens 8") --trace --out "$2-$3" --resume
}
# shellcheck disable=SC2046
figure17() { # how busy the device is over one answer of each method; 19 is its mean, from readings of NVML
    local code=0 number
    calibrated || echo "the machine's limits are not measured: counted bandwidth is left out" >&2
    for number in 17 19; do
        ssbench $((limit / 2)) paper "figure-$number" --device "$DEVICE" --dtype "$DTYPE" \
            --out "$results/figure17/figure-$number" --resume || code=1
    done
    return $code
}
# shellcheck disable=SC2046
roofline() { # what width costs, by random weights of 1B, 7B and 13B
    calibrated || return 1
    both costs "$results/roofline/roofline" $(small "--models lab 7b 1b 13b --widths 1 4 8 16 32 64 128 --contexts 512 4096" \
        "--models lab --widths 1 4 --contexts 64 --steps 2")
}
# shellcheck disable=SC2046
contexts() { # what a long context costs, by few widths
    calibrated || return 1
    both costs "$results/contexts/contexts" $(small "--models 7b 1b 13b --widths 1 8 32 --contexts 2048 8192 16384" \
        "--models lab --widths 1 --contexts 128 --steps 2")
}
costs() { # FILE OPTION... ENGINE
    local file=$1 engine=${*: -1}
    limited $((half - 60)) python3 benchmarks/roofline.py "${@:2:$#-2}" --methods verify medusa ss ss-pruned eagle \
        --device "$DEVICE" --dtype "$DTYPE" --engine "$engine" --out "$file.jsonl"
}
generate() { # `ar`, `sd` and `pld` against transformers' generate, and against its compiled static cache
    both against_generate
}
# shellcheck disable=SC2046
against_generate() { # ENGINE
    local file=$results/generate/generate-$1.txt
    [ ! -f "$file" ] || return 0
    limited "$half" python3 benchmarks/vs_transformers.py --device "$DEVICE" --dtype "$DTYPE" --engine "$1" --lengths 4 \
        $(small "--compiled --prompts 6 --repeats 2" "--no-compiled --prompts 1 --repeats 1 --new 8") |
        tee "$file.part" && mv "$file.part" "$file"
}
train() { # every trainer in bfloat16, and what was trained decodes; weights stay in WORK
    local code=0 part
    limited "$limit" bash benchmarks/gpu/train.sh "$WORK/train" $((limit / 3)) || code=$?
    for part in "$WORK"/train/run-* "$WORK"/train/*/training.jsonl; do
        [ ! -e "$part" ] || (cd "$WORK" && cp -r --parents "${part#"$WORK"/}" "$results")
    done
    return $code
}
# shellcheck disable=SC2046
batches() { # several requests at a time, eager
    ssbench "$limit" run --methods ss,medusa,eagle,hydra,sd --suite specbench --device "$DEVICE" --engine eager \
        --dtype "$DTYPE" $(small "--limit 2 --batch-size 2,4,8,16" "--limit 1 --max-new-tokens 4 --batch-size 2") \
        --out "$results/batches/lab" --resume
}
lab() { # the larger lab; its weights stay in WORK
    limited "$limit" bash benchmarks/gpu/lab.sh "$WORK/lab-m" "$(small m s)" $((limit - 10)) "${LAB_SCALE:-0.25}"
}
larger() { # all methods of the larger lab, once `lab` has trained it
    local family=$WORK/lab-m/export
    if [ ! -f "$family/lab.json" ]; then
        echo "the larger lab is not trained to its end in $WORK/lab-m: run the stage lab again" >&2
        return 1
    fi
    both all_methods "$family/base" "$results/larger/lab-m"
}

pack() { # STAGE: what was measured, without what is made of it again (`ssbench report`); and traces as far as they fit
    local file=$out/$1.tar.gz
    tar czf "$file.part" -C "$results" --exclude=traces --exclude='*.parquet' --exclude=report.html --exclude='*.part' \
        "$1" && mv "$file.part" "$file"
    [ "$(stat -c %s "$file")" -lt $most ] || echo "$file is larger than 15 MiB: does it come back?" >&2
    (cd "$results" && find . -path '*/traces/*' -type f -printf '%s %P\n') | sort -n |
        awk -v most=$most '{ sum += $1 + 1024; if (sum < most) print $2 }' | tar cf "$out/traces.tar" -C "$results" -T -
}

mkdir -p "$out" "$results"
for stage in "${stages[@]}"; do
    if [ -f "${FROM:=runs/from}/$stage.tar.gz" ] && [ ! -d "$results/$stage" ]; then
        tar xzf "$FROM/$stage.tar.gz" -C "$results" || exit 2
    fi
    mkdir -p "$results/$stage"
    echo "== $stage, $SECONDS s after the beginning"
    "$stage" 2>&1 | tee -a "$results/$stage/log.txt"
    [ "${PIPESTATUS[0]}" -eq 0 ] || failed+=("$stage")
    pack "$stage"
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed, or out of time (run again to go on): ${failed[*]}" >&2
    exit 1
fi
