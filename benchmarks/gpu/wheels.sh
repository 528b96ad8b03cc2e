#!/usr/bin/env bash
# Fetch, on a machine with a network, the wheels of required packages that a machine with torch and transformers often
# lacks, into one folder that git ignores; every script here installs from it. usage: wheels.sh [--all] [FOLDER]
# --all: also plotly (9.2 MiB), rouge-score with nltk (1.7) and sqlglot (0.8), without which pages have no charts, and
# summaries and SQL no score. PYTHON_TAG: 3.12 by default. Versions are those of constraints.txt.
set -euo pipefail
needed=(annotated-types greenlet msgspec platformdirs pydivsufsort tenacity typer==0.28.0)
large=(plotly nltk defusedxml rouge_score sqlglot)
# typer 0.28 is the last one that needs no pydantic, which is 2.7 MiB, and ssbench works with it; older ones fail where a
# mistake is reported. Taken to be there: torch transformers accelerate peft safetensors sentencepiece protobuf numpy scipy
# pandas pyarrow rich jinja2 pyyaml httpx filelock psutil nvidia-ml-py sacrebleu
all=${1:-}
[ "$all" = --all ] && shift || all=
folder=${1:-gpu-wheels} tag=${PYTHON_TAG:-3.12}
names=("${needed[@]}")
[ -z "$all" ] || names+=("${large[@]}")
platforms=()
for form in 2_39 2_35 2_34 2_31 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${form}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
mkdir -p "$folder"
rm -f "$folder"/*.whl
for name in "${names[@]}"; do
    case $name in *==*) pinned=$name ;; *) pinned=$(grep -i "^$name==" constraints.txt) ;; esac
    if [ "$name" = rouge_score ]; then # published as source alone, and the same for every Python
        python3 -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$folder" "$pinned"
    else
        python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
            --implementation cp --python-version "$tag" "${platforms[@]}" --dest "$folder" "$pinned"
    fi
done
ls "$folder"
python3 - "$folder" <<'PYTHON'
import pathlib, sys
size = sum(file.stat().st_size for file in pathlib.Path(sys.argv[1]).glob("*.whl"))
print(f"{sys.argv[1]}: {size / 2**20:.2f} MiB")
PYTHON
