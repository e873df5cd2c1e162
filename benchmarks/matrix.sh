#!/usr/bin/env bash
# `quire bench matrix` on all GPUs of a machine, in a limited time. quire is installed first into the environment of $PY (default:
# python3), editable and without a package index. The result is $OUT/$NAME.json, written after every row; $OUT/$NAME.logs.tgz has a
# log per process.
#
#   OUT=results DEADLINE=540 VLLM=/tmp/vllm-site benchmarks/matrix.sh                      # all models and cells
#   OUT=results MODELS=llama-8b,llama-1b CELLS='decode/*,online' benchmarks/matrix.sh      # some, quire alone
#   OUT=results RESUME='earlier/matrix1.json earlier/matrix2.json' benchmarks/matrix.sh    # what these do not have yet
#
# DEADLINE  seconds from the start of this script; nothing is started that may end later (default: 540)
# GPUS      GPUs to use, one model each (default: all)
# MODELS, CELLS, RESUME, RETRY=1, AGAINST, ARGS    --models, --cells, --resume, --retry, --against, more arguments
# VLLM      folder with vLLM (--vllm-path); empty: quire alone. What vLLM needs in front of it comes from PYTHONPATH.
#
# Merge results, and write the tables and the heat map of docs/performance.md:
#   python -m quire.graph_runner.bench.matrix_report results/*.json --out benchmarks/results/h200_matrix.json \
#       --docs docs/performance.md --plot docs/matrix.png
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-results} PY=${PY:-python3} NAME=${NAME:-matrix} DEADLINE=${DEADLINE:-540} VLLM=${VLLM:-}
GPUS=${GPUS:-$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')}
export PYTHONUNBUFFERED=1 QUIRE_KERNEL_BUILD_SECONDS=${QUIRE_KERNEL_BUILD_SECONDS:-180}  # kernels of a later start, not of a first
mkdir -p "$OUT"
"$PY" -m pip install -q --no-index --no-deps --no-build-isolation -e . || exit
arguments=(--gpus "$((GPUS > 0 ? GPUS : 1))" --out "$OUT/$NAME.json" --deadline "$((DEADLINE - SECONDS))")
[[ -z ${MODELS:-} ]] || arguments+=(--models "$MODELS")
[[ -z ${CELLS:-} ]] || arguments+=(--cells "$CELLS")
[[ -z ${RETRY:-} ]] || arguments+=(--retry)
[[ -z ${AGAINST:-} ]] || arguments+=(--against "$AGAINST")
[[ -z $VLLM ]] || arguments+=(--vs vllm --vllm-path "$VLLM")
read -ra more <<< "${ARGS:-}"
read -ra resume <<< "${RESUME:-}"
timeout $((DEADLINE - SECONDS + 20)) "$PY" -m quire.graph_runner.cli bench matrix "${arguments[@]}" "${more[@]}" \
    --resume "${resume[@]}" 2>&1 | tee "$OUT/$NAME.log"
code=${PIPESTATUS[0]}
tar -C "$OUT" --remove-files -czf "$OUT/$NAME.logs.tgz" $(cd "$OUT" && ls "$NAME".*.log 2>/dev/null) 2>/dev/null  # many files
exit "$code"
