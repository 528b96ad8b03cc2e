#!/usr/bin/env bash
# All that needs a GPU, the most valuable first, in stages of under ten minutes. usage: all.sh OUT [STAGE...]
# Stages, in this order when none is given: sameness telemetry figure17 roofline contexts attention generate batches lab
# larger.
# README.md beside this file says what each leaves. Each goes on from what it finds in OUT, but for sameness, which is made
# anew. A stage that fails is named at the end, and the others are made all the same.
# LAB_SCALE: the share of the larger lab's budget that `lab` trains with; another share takes another OUT.
set -uo pipefail
out=${1:?usage: all.sh OUT [STAGE...]}
shift
known=(sameness telemetry figure17 roofline contexts attention generate batches lab larger)
stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=("${known[@]}")
for stage in "${stages[@]}"; do
    [[ " ${known[*]} " == *" $stage "* ]] || { echo "no stage $stage; stages: ${known[*]}" >&2; exit 2; }
done
mkdir -p "$out"
export PYTHONPATH=${PYTHONPATH:-.} PYTHONUNBUFFERED=1
limit=540 # seconds of a stage
failed=()
python3 -c 'import torch, transformers; print(torch.cuda.get_device_name(), torch.__version__, transformers.__version__)' |
    tee "$out/device.txt"

ssbench() { # SECONDS ARGUMENT...
    local seconds=$1
    shift
    timeout "$seconds" python3 -m specbench_ss "$@"
}
both() { # COMMAND...: with each engine as its last argument, operator by operator and replayed
    local code=0 engine
    for engine in eager graph; do
        "$@" "$engine" || code=1
    done
    return $code
}

sameness() { # every lossless method against `ar`, float32 and bfloat16
    both same_answers
}
same_answers() { # ENGINE
    timeout $((limit / 2)) python3 benchmarks/gpu/sameness.py --engine "$1" | tee "$out/sameness-$1.txt"
}
telemetry() { # all methods of the lab, with what the GPU did
    both all_methods lab "$out/lab"
}
all_methods() { # MODEL FOLDER ENGINE
    ssbench $((limit / 2)) run --model "$1" --methods all --suite specbench --device cuda --engine "$3" --dtype bfloat16 \
        --limit 2 --trace --out "$2-$3" --resume
}
figure17() { # how busy the device is over one answer of each method; 19 is its mean, from readings of NVML
    local code=0 number
    for number in 17 19; do
        ssbench $((limit / 2)) paper "figure-$number" --device cuda --dtype bfloat16 --out "$out/figure-$number" --resume ||
            code=1
    done
    return $code
}
roofline() { # what width costs, by random weights of 1B, 7B and 13B
    ssbench 120 doctor --calibrate || return 1
    both costs "$out/roofline" --models lab 7b 1b 13b --widths 1 4 8 16 32 64 128 --contexts 512 4096
}
contexts() { # what a long context costs, by few widths
    ssbench 120 doctor --calibrate || return 1
    both costs "$out/contexts" --models 7b 1b 13b --widths 1 8 32 --contexts 2048 8192 16384
}
costs() { # FILE OPTION... ENGINE
    local file=$1 engine=${*: -1}
    timeout $((limit / 2 - 60)) python3 benchmarks/roofline.py "${@:2:$#-2}" --methods verify medusa ss ss-pruned eagle \
        --device cuda --dtype bfloat16 --engine "$engine" --out "$file.jsonl" --plot "$file-$engine.png"
}
attention() { # which way to attend is fast here, by the heads of Llama 3 8B and of SmolLM2
    local heads
    for heads in "32 8 128" "9 3 64"; do # shellcheck disable=SC2086
        timeout $((limit / 2)) python3 benchmarks/attention_ways.py --device cuda --flex --heads $heads || return 1
    done | tee "$out/attention.txt"
}
generate() { # `ar`, `sd` and `pld` beside transformers' generate, and beside its compiled static cache
    both beside_generate
}
beside_generate() { # ENGINE
    local file=$out/generate-$1.txt
    [ ! -f "$file" ] || return 0
    timeout $((limit / 2)) python3 benchmarks/vs_transformers.py --device cuda --dtype bfloat16 --engine "$1" --compiled \
        --prompts 6 --repeats 2 --lengths 4 | tee "$file.part" && mv "$file.part" "$file"
}
batches() { # several requests at a time, operator by operator
    ssbench $limit run --methods ss,medusa,eagle,hydra,sd --suite specbench --device cuda --engine eager --dtype bfloat16 \
        --limit 2 --batch-size 2,4,8,16 --out "$out/lab-batches" --resume
}
lab() { # the larger lab
    bash benchmarks/gpu/lab.sh "$out/lab-m" m $limit "${LAB_SCALE:-0.25}"
}
larger() { # all methods of the larger lab, once `lab` has trained it
    local family=$out/lab-m/export
    if [ ! -f "$family/lab.json" ]; then
        echo "the larger lab is not trained to its end in $out/lab-m: run the stage lab again" >&2
        return 1
    fi
    both all_methods "$family/base" "$out/lab-m-run"
}

for stage in "${stages[@]}"; do
    "$stage" || failed+=("$stage")
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed, or out of time (run again to go on): ${failed[*]}" >&2
    exit 1
fi
