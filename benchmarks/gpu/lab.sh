#!/usr/bin/env bash
# Train the lab family on this machine's GPU. usage: lab.sh OUT [s|m]; run again to go on.
set -euo pipefail
out=${1:?usage: lab.sh OUT [s|m]} size=${2:-s}
export PYTHONPATH=${PYTHONPATH:-.} PYTHONUNBUFFERED=1
python3 -c 'import torch, transformers; print(torch.cuda.get_device_name(), torch.__version__, transformers.__version__)'
timeout 570 python3 -m specbench_ss lab train --out "$out" --size "$size" --device cuda
