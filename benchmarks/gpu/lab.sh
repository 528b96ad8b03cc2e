#!/usr/bin/env bash
# Train the lab family on this machine's GPU. usage: lab.sh OUT [s|m] [SECONDS] [SCALE]; run again to go on.
# SECONDS ends the training, resumable, after so long: for machines that end a command after some minutes and lose what
# it had written. 0 or none: no limit. SCALE: share of the full number of steps; one OUT is for one SCALE.
set -euo pipefail
out=${1:?usage: lab.sh OUT [s|m] [SECONDS] [SCALE]} size=${2:-s} seconds=${3:-0} scale=${4:-1}
. benchmarks/gpu/preamble.sh
limited "$seconds" python3 -m lab train --out "$out" --size "$size" --device "$DEVICE" --budget-scale "$scale"
