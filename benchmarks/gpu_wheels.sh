#!/usr/bin/env bash
# Collect the wheels that adapters.py and evaluate.py need on a GPU machine without a package index, where torch and transformers
# are installed (Python 3.12, x86-64 Linux). About 11 MB:
#
#   peft 0.21.2 (0.8 MB), accelerate 1.15.0 (0.4 MB), psutil 7.2.2 (0.2 MB)     adapters.py
#   lm_eval 0.4.13 (9.1 MB), dill 0.4.1 (0.1 MB), and accelerate                evaluate.py (HFLM needs no pyarrow, no datasets)
#   nothing                                                                     grpo.py
#
#   benchmarks/gpu_wheels.sh OUT_FOLDER [more requirements ...]                 # where pip works
#   python3 -m pip install -q --no-index --no-deps --no-compile --target SITE OUT_FOLDER/*.whl; export PYTHONPATH=SITE
#
# More, to run TRL's own trainers there (needs pyarrow and xxhash too): trl==1.16.0 datasets==5.2.0 multiprocess==0.70.19
set -eu
out=${1:?usage: gpu_wheels.sh OUT_FOLDER [requirement ...]}; shift
mkdir -p "$out"
platforms=()
for tag in manylinux_2_{39,35,34,31,28,27,24,17,12,5}_x86_64 manylinux2014_x86_64 manylinux2010_x86_64 manylinux1_x86_64; do
    platforms+=(--platform "$tag")
done
for requirement in peft==0.21.2 accelerate==1.15.0 psutil==7.2.2 lm_eval==0.4.13 dill==0.4.1 "$@"; do
    "${PY:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --abi cp312 --abi abi3 --abi none "${platforms[@]}" -d "$out" "$requirement"
done
du -sh "$out"
