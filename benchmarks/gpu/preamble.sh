# shellcheck shell=bash
# Sourced by every script here, from the repository's root: makes the checkout and the wheels of gpu-wheels/ known to
# python3, and stops with one line and exit code 2 where a required package or the device is not there.
# WORK: folder of all that is made here, kept out of git. DEVICE: cuda, cuda:N or cpu. DTYPE: of what is timed.
# TINY: not empty makes everything as small as it can be, to try the scripts. CALL: seconds that all of it may take; 0:
# no limit. HF_HUB_OFFLINE=0: hub ids may be fetched.
if [ ! -f benchmarks/gpu/preamble.sh ]; then
    echo "run this from the repository's root" >&2
    exit 2
fi
WORK=$(realpath -m "${WORK:-runs/gpu}")
export WORK DEVICE=${DEVICE:-cuda} DTYPE=${DTYPE:-bfloat16} TINY=${TINY:-} CALL=${CALL:-0}
export TORCH_CUDNN_SDPA_DEPRIORITIZED=1 # where no target is loaded, which switches cuDNN's attention off
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} SSBENCH_CACHE=${SSBENCH_CACHE:-$WORK/cache}
if [ -z "${GPU_READY:-}" ]; then
    site=$WORK/site
    if compgen -G "${WHEELS:=gpu-wheels}/*.whl" >/dev/null; then
        python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
            --upgrade --target "$site" "$WHEELS"/*.whl ||
            { echo "the wheels in $WHEELS do not fit this Python: make them again (benchmarks/gpu/wheels.sh)" >&2; exit 2; }
    fi
    export PYTHONPATH=$PWD:$site${PYTHONPATH:+:$PYTHONPATH}
    python3 benchmarks/gpu/ready.py "$site" "$DEVICE" || exit 2
    export GPU_READY=1
fi

limited() { # SECONDS COMMAND...: ended after so long, and before CALL is over; 0: no limit but that
    local seconds=$1
    shift
    if [ "$CALL" -gt 0 ]; then
        local left=$((CALL - SECONDS))
        [ "$left" -gt 5 ] || { echo "no time is left in this call for: $*" >&2; return 124; }
        if [ "$seconds" -eq 0 ] || [ "$left" -lt "$seconds" ]; then seconds=$left; fi
    fi
    CALL=$((seconds > 10 ? seconds - 10 : seconds)) timeout --kill-after=10 "$seconds" "$@" # of a script within: less
}
ssbench() { # SECONDS ARGUMENT...
    local seconds=$1
    shift
    limited "$seconds" python3 -m specbench_ss "$@"
}
failed=()
try() { # WHAT COMMAND...: a failure is noted, and the rest is still tried
    local what=$1 code=0
    shift
    "$@" || code=$?
    [ "$code" -eq 0 ] || failed+=("$what: exit $code$([ "$code" -ne 124 ] || echo ', out of time: run again to go on')")
}
end() { # list what failed
    [ ${#failed[@]} -eq 0 ] || { printf 'failed: %s\n' "${failed[@]}" >&2; exit 1; }
}
