#!/usr/bin/env bash
# Measurements behind benchmarks/results, on one GPU. Each part writes JSON and a log to $OUT (default: results). quire is installed
# first into the environment of $PY (default: python3), editable and without a package index.
#
#   benchmarks/measure.sh decode mixed prefill start        # parts, in the order given
#   MODEL=tiny OUT=/tmp/out PY=.venv/bin/python benchmarks/measure.sh start     # a dry run
#
# decode    ms per step at B = 1, 8, 32, 128, context 1024: triton, then flashinfer; triton: triton only
# pdl       the same for triton with programmatic dependent launch; nofuse: without the rope fusion
# mixed     256 requests of mixed lengths; prefill: 128 x 960 and 1 x 960 tokens
# start     cold and warm
# attention the attention kernels alone, and the times for attention="auto"
# kv        decode with int8 and fp8 KV caches; weights: decode with torchao's int8, fp8 and int4 weights
# linears   launch parameters for int8 and fp8 weights
# kernels   attention kernels over the whole grid, beside rivals: SYSTEMS=triton,vllm-fa3 GPUS=4 GRID='--dims 64,128';
#           with --sweep in GRID also triton's with other launch parameters
# rivals    transformers' generate, its static cache and continuous batching, vLLM where it is installed
# tests     the GPU tests (or $TESTS), $JOBS (8) at a time, then those that must run alone
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-results} PY=${PY:-python3} LIMIT=${LIMIT:-300} MODEL=${MODEL:-llama-8b}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1
"$PY" -m pip install -q --no-index --no-deps --no-build-isolation -e . || exit

bench() {  # name, arguments of quire bench
    local name=$1; shift
    timeout "$LIMIT" "$PY" -m quire.graph_runner.cli bench "$@" --model "$MODEL" --out "$OUT/$name.json" > "$OUT/$name.log" 2>&1
    echo "== $name: exit $?"; grep -vE '^\s*$' "$OUT/$name.log" | tail -"${LINES_SHOWN:-14}" | cut -c1-200
}

for part in "$@"; do
    began=$SECONDS
    case $part in
        decode)    bench h200_decode decode --attention triton,flashinfer --batch 1,8,32,128 --context 1024 ;;
        triton)    bench h200_decode_triton decode --attention triton --batch 1,8,32,128 --context 1024 ;;
        pdl)       QUIRE_PDL=1 bench h200_decode_pdl decode --attention triton --batch 1,8,32,128 --context 1024 ;;
        nofuse)    bench h200_decode_no_rope decode --attention triton --batch 1,32,128 --engine fusions=projections,small_linear ;;
        mixed)     bench h200_mixed256 mixed256 --attention triton ;;
        prefill)   bench h200_prefill prefill --attention triton ;;
        start)     bench h200_start start --attention triton ;;
        kv)        for t in int8 fp8; do bench "h200_decode_kv_$t" decode --attention triton --kv-cache-dtype $t --batch 1,32,128; done ;;
        weights)   for t in int8wo fp8wo int4wo; do bench "h200_decode_$t" decode --attention triton --quantize $t --batch 1,32,128; done ;;
        rivals)    bench h200_rivals decode --systems quire,hf-eager,hf-static,hf-cb --attention triton --vs vllm --batch 1,32 ;;
        attention) bench h200_attention attention --attention triton,flashinfer --save ;;
        linears)   timeout "$LIMIT" "$PY" benchmarks/small_linear.py --codes int8,float8_e4m3fn --tokens 1,8,32,64,128,256 \
                       --json "$OUT/h200_small_linear_codes.json" --table "$OUT/small_linear_configs.json" \
                       > "$OUT/linears.log" 2>&1; tail -"${LINES_SHOWN:-60}" "$OUT/linears.log" ;;
        kernels)   "$PY" benchmarks/attention_grid.py --out "$OUT/${NAME:-h200_attention_grid}.json" --resume ${RESUME:-} \
                       --gpus "${GPUS:-1}" --systems "${SYSTEMS:-triton}" --deadline "$LIMIT" ${GRID:-} > "$OUT/kernels.log" 2>&1
                   tail -"${LINES_SHOWN:-60}" "$OUT/kernels.log" | cut -c1-200 ;;
        tests)
            read -ra tests <<< "${TESTS:-tests/gpu tests/attn_ops/ops/test_rope.py tests/attn_ops/ops/test_small_linear.py}"
            # Many processes share the CPU, so each compiles in one thread. -vv: a line per test, in case time runs out.
            alike=(OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 QUIRE_COMPILE_WORKERS=0)  # not for later parts
            for alone in "not alone" alone; do
                many=(); [[ $alone == alone ]] || many=(-n "${JOBS:-8}" --dist worksteal)
                timeout "$LIMIT" env "${alike[@]}" "$PY" -m pytest -vv --show-capture=no -p no:cacheprovider -m "$alone${MARK:+ and ($MARK)}" \
                    "${many[@]}" "${tests[@]}" -rfE --durations=15 > "$OUT/tests_${alone// /_}.log" 2>&1
                echo "== tests, $alone: exit $?"; tail -"${LINES_SHOWN:-30}" "$OUT/tests_${alone// /_}.log" | cut -c1-200
            done ;;
        *) echo "unknown part $part; see the top of this file" >&2; exit 2 ;;
    esac
    echo "-- $part took $((SECONDS - began)) s"
done
