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
# long      long prompts with attention="auto" and with triton alone, $LONG_MODELS (llama-8b qwen3-0.6b) x $LONG_CELLS; compiles
#           FlashInfer's prefill kernels first (long_build.log has the seconds) while triton is measured on the first model
# start     cold and warm
# attention the attention kernels alone, of $HEADS (such as 32/8x128,16/8x128; default: $MODEL), and the times for attention="auto" as
#           $OUT/attention.json. To ship those: python -c 'from pathlib import Path; from quire.attn_ops.tuning import attention
#           as t; print(t.save(t.load(Path("results/attention.json")), t.STORE.shipped))'
# kv        decode with int8 and fp8 KV caches; weights: decode with torchao's int8, fp8 and int4 weights
# linears   launch parameters for int8 and fp8 weights; wide: of the kernels for up to 256 tokens, and int4
# kernels   attention kernels over the whole grid, beside rivals: SYSTEMS=triton,vllm-fa3 GPUS=4 GRID='--dims 64,128';
#           with --sweep in GRID also triton's with other launch parameters
# rivals    transformers' generate, its static cache and continuous batching, vLLM where it is installed
# against   decode with triton, compared with benchmarks/results/h200_decode_triton.json (or $BEFORE); exits with 1 if slower
# pieces    flashinfer's steps of decodes and a prompt, captured in pieces and not
# backends  attention kernels of the backends side by side (backend_kernels.py); mla: on the latent cache; composite: hybrid,
#           cascade and two_batch beside their parts; sparse: approximate decoding at 32k. Each ends before LIMIT,
#           and a call with RESUME='earlier.json ...' goes on with it; $KERNELS: more arguments
# engines   decode steps with cascades and two half batches, and approximate ones at a long context ($CONTEXT, 32768)
# prefix    time to first token of requests that begin equally; fast_prefill: with kv_sharing_fast_prefill and without
# profile   GPU time by kernel; extend: attention of long prompts by pages and by contiguous keys ($EXTEND)
# experts   the experts' kernels
# windows   KV memory and step time of a window model, with the window and without; mixed_windows: of one that mixes windows and
#           full layers; updates: of all weights; cast: of the copy in the dtype that the engine computes in
# kits      the conformance kit on every backend in $KIT_JOBS (12) processes, as JSON for docs/backends.md; RESUME as above
# page      docs/backends.md from the kit's JSON files in $KITS_JSON (default: $OUT/*kits*.json)
# grpo      rollouts and training beside generate_batch and vLLM colocated, of $GRPO_MODELS (qwen3-0.6b llama-1b; LIMIT=340
#           for each, with vLLM)
# evaluate  lm-eval's requests per second: quire, HFLM, vLLM; adapters: what LoRA costs in a decode step (gpu_wheels.sh has
#           the wheels that both need)
# logprobs  what log probabilities cost in a decode step, of $LOGPROBS (--model qwen3-0.6b)
# tests     the GPU tests (or $TESTS), $JOBS (8) at a time, then those that must run alone. passed_<digest of the sources>.txt has
#           those that passed, and h200_kits_suite_<digest>.json the kit's results, as of kits; RESUME goes on with such files;
#           CUDA_VISIBLE_DEVICES=0,1,2 spreads the processes over several GPUs; ALONE=no, ALONE=yes: one of the two kinds of tests.
#           gpu_suite.sh does all of it at once on a host of several GPUs
#
# LIMIT     seconds for each command (300); TOTAL: for all of them (any). Most parts end themselves before LIMIT, and keep what
#           they have. The exit code is that of the last part that failed, or 0. More arguments: $BENCH for quire bench, $PREFIX,
#           $EXPERTS, $EXTEND, $KITS, $KERNELS; others in the place of the model and sizes: $WINDOW, $MIXED, $UPDATES, $CAST, $PIECES,
#           $FAST_PREFILL, $GRPO, $EVALUATE, $ADAPTERS.
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-results} PY=${PY:-python3} LIMIT=${LIMIT:-300} MODEL=${MODEL:-llama-8b}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1
[[ -n ${INSTALLED:-} ]] || "$PY" -m pip install -q --no-index --no-deps --no-build-isolation -e . || exit
worst=0

allowed() {  # seconds that the next command may take
    local left=$((${TOTAL:-1000000} - SECONDS))
    echo $((left > LIMIT ? LIMIT : left > 1 ? left : 1))
}

deadline() {  # [at most]: the same for a script that ends by itself and writes what it has, without the time of its imports
    local left most=${1:-100000}; left=$(allowed); left=$((left > 40 ? left - 20 : left))
    echo $((left > most ? most : left))
}

# Families of backends have no backend of their own in "all"; with room for all keys the approximate ones are exact.
KIT=all,hybrid:flashinfer+triton,hybrid:triton+flashinfer_mla,cascade:triton@1,two_batch:triton,local:flashinfer,local:triton,double_sparsity:1048576:0:all,dual_chunk:1048576:524288

script() {  # name of the result, script, its arguments; ends by itself
    local name=$1 file=$2; shift 2
    run "h200_$name" "benchmarks/$file.py" --json "$OUT/h200_$name.json" --deadline "$(deadline)" "$@"
}

bench() {  # name, arguments of quire bench
    local name=$1; shift
    run "$name" -m quire.graph_runner.cli bench "$@" --model "$MODEL" --out "$OUT/$name.json" ${BENCH:-}
}

run() {  # name, arguments of python
    local name=$1 code; shift
    timeout "$(allowed)" "$PY" "$@" > "$OUT/$name.log" 2>&1; code=$?
    ((code == 0)) || worst=$code
    echo "== $name: exit $code"; grep -vE '^\s*$' "$OUT/$name.log" | tail -"${LINES_SHOWN:-14}" | cut -c1-200
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
        long)      (time nice "$PY" -m quire.attn_ops.backends.flashinfer.modules \
                       <<< '{"seconds": 240, "modules": [["fa3", "bfloat16", 128, false, false]]}') > "$OUT/long_build.log" 2>&1 &
                   build=$!
                   read -ra models <<< "${LONG_MODELS:-llama-8b qwen3-0.6b}"
                   for each in "${models[0]} triton" "${models[0]} auto" "${models[@]:1}"; do
                       read -r model attention <<< "$each"
                       for attention in ${attention:-auto triton}; do
                           [[ $attention == triton ]] || wait "$build" || { worst=$?; tail -5 "$OUT/long_build.log"; }
                           run "h200_long_${model}_$attention" -m quire.graph_runner.cli bench matrix --models "$model" \
                               --cells "${LONG_CELLS:-prefill/1x16384,prefill/4x32704,mixed256}" --attention "$attention" -v \
                               --resume --out "$OUT/h200_long_${model}_$attention.json" --deadline "$(allowed)"
                       done
                   done
                   grep real "$OUT/long_build.log" ;;
        start)     bench h200_start start --attention triton ;;
        kv)        for t in int8 fp8; do bench "h200_decode_kv_$t" decode --attention triton --kv-cache-dtype $t --batch 1,32,128; done ;;
        weights)   for t in int8wo fp8wo int4wo; do bench "h200_decode_$t" decode --attention triton --quantize $t --batch 1,32,128; done ;;
        rivals)    bench h200_rivals decode --systems quire,hf-eager,hf-static,hf-cb --attention triton --vs vllm --batch 1,32 ;;
        against)   bench h200_decode_now decode --attention triton --batch 1,8,32,128 --context 1024 \
                       --against "${BEFORE:-benchmarks/results/h200_decode_triton.json}" ;;
        pieces)    script pieces pieces ${PIECES:---model qwen3-0.6b} ;;
        backends)  script kernels backend_kernels kernels ${KERNELS:-} --resume ${RESUME:-} ;;
        mla|composite|sparse) script "$part" backend_kernels "$part" ${KERNELS:-} --resume ${RESUME:-} ;;
        engines)   bench h200_decode_composite decode --attention triton,cascade:triton,two_batch:triton --batch 8,32,128
                   bench h200_decode_sparse decode --attention triton,double_sparsity:2048:0:all --batch 1,8 \
                       --context "${CONTEXT:-32768}" ;;
        prefix)    script prefix prefix --model "$MODEL" ${PREFIX:-} ;;
        fast_prefill) script fast_prefill fast_prefill \
                       ${FAST_PREFILL:---attention triton --hidden 2048 --layers 7 --shared 3 --prompt 8192 --prompts 5} ;;
        profile)   run h200_profile benchmarks/profile_step.py --model "$MODEL" --attention triton --prefill 8192,960 \
                       --json "$OUT/h200_profile.json" ;;
        extend)    script extend attention_grid --only extend --resume ${EXTEND:---groups 4,2 --dims 128,64,256 \
                       --kv bfloat16 --prefills 1x8192+8192,1x16384,1x8192+24576,64x1024,1x2048,1x512+16384,4x4096 \
                       --systems triton:mode=never,triton:mode=always,contiguous,contiguous-copy} ;;
        experts)   run h200_experts benchmarks/experts.py --json "$OUT/h200_experts.json" ${EXPERTS:-} ;;
        windows)   script window window_weights window \
                       ${WINDOW:---model mistral-7b --context 32768 --window 4096 --batch 8} ;;
        mixed_windows) script mixed_windows window_weights mixed \
                       ${MIXED:---model gemma-3-12b --layers 12 --context 32768 --window 1024 --batch 8} ;;
        updates)   script updates window_weights weights ${UPDATES:---model $MODEL} ;;
        cast)      script cast window_weights cast ${CAST:---model qwen3-0.6b} ;;
        kits)      run h200_kits -m quire.attn_ops.conformance --json "$OUT/h200_kits.json" --jobs "${KIT_JOBS:-12}" \
                       --deadline "$(deadline)" --resume ${RESUME:-} --backend "${KITS_BACKENDS:-$KIT}" ${KITS:-} ;;
        page)      "$PY" -m quire.attn_ops.conformance.page ${KITS_JSON:-$OUT/*kits*.json} docs/backends.md > "$OUT/backends.md" \
                       && cp "$OUT/backends.md" docs/backends.md || worst=1 ;;
        grpo)      for m in ${GRPO_MODELS:-qwen3-0.6b llama-1b}; do
                       script "grpo_$m" grpo --model "$m" ${GRPO:---ways quire,generate_batch,vllm}; done ;;
        adapters)  script adapters adapters ${ADAPTERS:---model $MODEL --attention triton} ;;
        logprobs)  script logprobs logprobs ${LOGPROBS:---model qwen3-0.6b --attention triton} ;;
        evaluate)  script evaluate evaluate ${EVALUATE:---model $MODEL --documents 128 --batch 64 --examples 1000} ;;
        attention) QUIRE_CACHE_DIR="$OUT" bench h200_attention attention --attention triton,flashinfer --save \
                       ${HEADS:+--heads "$HEADS"} ;;
        linears)   LINES_SHOWN=${LINES_SHOWN:-60} run linears benchmarks/small_linear.py --codes int8,float8_e4m3fn \
                       --tokens 1,8,32,64,128,256 --json "$OUT/h200_small_linear_codes.json" --table "$OUT/small_linear_configs.json" ;;
        wide)      script small_linear_wide small_linear --wide --models llama-8b,qwen3-8b,llama2-7b,qwen3-0.6b \
                       --codes int8,float8_e4m3fn,int4 --tokens 128,32,64,256,8,1 ${KEEP:+--keep} ;;
        kernels)   "$PY" benchmarks/attention_grid.py --out "$OUT/${NAME:-h200_attention_grid}.json" --resume ${RESUME:-} \
                       --gpus "${GPUS:-1}" --systems "${SYSTEMS:-triton}" --deadline "$(allowed)" ${GRID:-} > "$OUT/kernels.log" 2>&1
                   tail -"${LINES_SHOWN:-60}" "$OUT/kernels.log" | cut -c1-200 ;;
        tests)
            read -rd "" -a tests <<< "${TESTS:-$(cat benchmarks/gpu_tests.txt) tests/test_install.py}"
            # Many processes share the CPU, so each compiles in one thread. -vv: a line per test, in case time runs out.
            digest=$(find quire attn_ops passes graph_runner integrations tests -name '*.py' | sort | xargs cat | sha1sum | cut -c1-12)
            passed=passed_$digest.txt kits=h200_kits_suite_$digest.json
            for file in ${RESUME:-}; do
                [[ ${file##*/} != "$passed" || $file -ef $OUT/$passed ]] || cat "$file" >> "$OUT/$passed"
                [[ ${file##*/} != "$kits" || $file -ef $OUT/$kits ]] || cp "$file" "$OUT/$kits"
            done
            alike=(OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 QUIRE_COMPILE_WORKERS=0 QUIRE_KITS_JSON="$OUT/$kits")
            which=("not alone" alone)
            case ${ALONE:-} in no) which=("not alone") ;; yes) which=(alone) ;; esac
            for alone in "${which[@]}"; do
                many=(); [[ $alone == alone ]] || many=(-n "${JOBS:-8}" --dist worksteal)
                # As by Ctrl-C, which gpu_suite.sh's parts would ignore: pytest then prints the tracebacks that it has.
                timeout -s INT -k 20 "$(allowed)" env --default-signal=INT "${alike[@]}" \
                    QUIRE_KITS_SECONDS="$(deadline)" "$PY" -m pytest -vv --show-capture=no -p no:cacheprovider \
                    -m "$alone${MARK:+ and ($MARK)}" "${many[@]}" "${tests[@]}" --passed "$OUT/$passed" -rfE --durations=15 > "$OUT/tests_${alone// /_}.log" 2>&1
                code=$?; ((code == 0 || code == 5)) || worst=$code  # 5: no test was chosen
                echo "== tests, $alone: exit $code"; tail -"${LINES_SHOWN:-30}" "$OUT/tests_${alone// /_}.log" | cut -c1-200
            done ;;
        *) echo "unknown part $part; see the top of this file" >&2; exit 2 ;;
    esac
    echo "-- $part took $((SECONDS - began)) s"
done
exit "$worst"
