#!/usr/bin/env bash
# All that needs a GPU, the most valuable first, in stages of under ten minutes. usage: all.sh OUT [STAGE...]
# Stages: sameness telemetry roofline batches lab; none given: all of them, in this order. Each goes on from what it finds in OUT,
# but for sameness, which is made anew.
# A stage that fails is named at the end, and the others are made all the same.
set -uo pipefail
out=${1:?usage: all.sh OUT [STAGE...]}
shift
stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=(sameness telemetry roofline batches lab)
mkdir -p "$out"
export PYTHONPATH=${PYTHONPATH:-.} PYTHONUNBUFFERED=1
limit=540 # seconds of a stage
failed=()
python3 -c 'import torch, transformers; print(torch.cuda.get_device_name(), torch.__version__, transformers.__version__)' |
    tee "$out/device.txt"

sameness() { # every lossless method against `ar`, float32 and bfloat16, operator by operator and replayed
    local code=0
    for engine in eager graph; do
        timeout $((limit / 2)) python3 benchmarks/gpu/sameness.py --engine "$engine" | tee "$out/sameness-$engine.txt" || code=1
    done
    return $code
}
telemetry() { # all methods of the lab, with what the GPU did
    local code=0
    for engine in eager graph; do
        timeout $((limit / 2)) python3 -m specbench_ss run --methods all --suite specbench --device cuda --engine "$engine" \
            --dtype bfloat16 --limit 2 --trace --out "$out/lab-$engine" --resume || code=1
    done
    return $code
}
roofline() { # what width and context cost, by random weights of 1B, 7B and 13B
    local code=0
    timeout 120 python3 -m specbench_ss doctor --calibrate || return 1
    for engine in eager graph; do
        timeout $((limit / 2 - 60)) python3 benchmarks/roofline.py --models lab 7b 1b 13b --dtype bfloat16 --engine "$engine" \
            --widths 1 4 8 16 32 64 128 --contexts 512 4096 --out "$out/roofline.jsonl" --plot "$out/roofline-$engine.png" || code=1
    done
    return $code
}
batches() { # several requests at a time, operator by operator
    timeout $limit python3 -m specbench_ss run --methods ss,medusa,eagle,hydra,sd --suite specbench --device cuda \
        --engine eager --dtype bfloat16 --limit 2 --batch-size 2,4,8,16 --out "$out/lab-batches" --resume
}
lab() { # the larger lab
    bash benchmarks/gpu/lab.sh "$out/lab-m" m $limit
}

for stage in "${stages[@]}"; do
    "$stage" || failed+=("$stage")
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed, or out of time (run again to go on): ${failed[*]}" >&2
    exit 1
fi
