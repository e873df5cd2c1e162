#!/usr/bin/env bash
# The whole GPU suite in one run, on a host of two GPUs or more: tests that must run alone have the last GPU and four cores of their
# own, the conformance kit the one or two before, and tests that run beside others the rest; of two GPUs these share the first.
# Exits with 0 if nothing failed and nothing is left. FlashInfer's modules (flashinfer_modules.py) are found on PYTHONPATH, or
# compiled here.
#
#   OUT=results LIMIT=1200 benchmarks/gpu_suite.sh           # seconds; what is cut off by then is in $OUT/*/tests_*.log
#   OUT=more RESUME=results benchmarks/gpu_suite.sh          # goes on where the same sources were, with what has not passed
set -u
cd "$(dirname "$0")/.."
export PY=${PY:-python3} LIMIT=${LIMIT:-1200} INSTALLED=1
out=${OUT:-results} cores=${CORES:-$(nproc)} gpus=${GPUS:-$(nvidia-smi -L | wc -l)}
((gpus > 1 && cores > 15)) || { echo "needs two GPUs and 16 cores; use measure.sh tests" >&2; exit 2; }
TOTAL=$LIMIT; export TOTAL
kit=tests/gpu/test_conformance_gpu.py
files=$(grep -v "$kit" benchmarks/gpu_tests.txt; echo tests/test_install.py)
"$PY" -m pip install -q --no-index --no-deps --no-build-isolation -e . || exit

part() {  # name, GPUs, first core, number of cores, ALONE, tests
    local earlier="" pattern
    for pattern in 'passed_*.txt' 'h200_kits_suite_*.json'; do
        earlier+=" $(compgen -G "${RESUME:-/nowhere}/$1/$pattern" | tr '\n' ' ')"
    done
    CUDA_VISIBLE_DEVICES=$2 ALONE=$5 TESTS="${*:6}" OUT=$out/$1 JOBS=$4 RESUME=$earlier taskset -c "$3-$(($3 + $4 - 1))" \
        benchmarks/measure.sh tests > "$out/$1.log" 2>&1
    local code=$?
    echo "$1: exit $code after $SECONDS s"; tail -4 "$out/$1.log"
    return "$code"
}

mkdir -p "$out"
many=$(((cores - 4) / 3)) pids=()  # the kit takes longer, above all on a machine whose Triton cache is empty
first=$((gpus > 3 ? gpus - 3 : gpus - 2))  # of the kit's GPUs
part many "$(seq -s, 0 $((first > 0 ? first - 1 : 0)))" 0 "$many" no $files & pids+=($!)
part kit "$(seq -s, "$first" $((gpus - 2)))" "$many" "$((cores - many - 4))" yes "$kit" & pids+=($!)
part alone "$((gpus - 1)),$((gpus - 2))" "$((cores - 4))" 4 yes $files & pids+=($!)
worst=0
for pid in "${pids[@]}"; do wait "$pid" || worst=1; done
exit "$worst"
