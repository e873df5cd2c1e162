#!/usr/bin/env bash
# Everything that is worth measuring on a new version, in order of value, as pieces of a few minutes. Each call runs the next
# pieces that fit into its time and are not done; $OUT gets their results, and <piece>.done with the exit code.
#
#   OUT=results benchmarks/gpu_session.sh                           # again and again, until it says that nothing is left
#   SEEN='first second' OUT=third benchmarks/gpu_session.sh         # the same where each call has a folder of its own
#   ONLY='decode suite' RETRY=1 benchmarks/gpu_session.sh           # these pieces; those that failed too
#
# DEADLINE  seconds from the start of this script; no piece is started that may take longer (default: 540)
# SEEN      folders of earlier calls (default: $OUT)
# VLLM, GPUS, JOBS, LAYERS, MODEL, ...    as for measure.sh and matrix.sh, which do the work
# LIST=1    print the pieces, with the seconds that they may take, and which are done
set -u
cd "$(dirname "$0")/.."
export OUT=${OUT:-results} PY=${PY:-python3} JOBS=${JOBS:-16}
DEADLINE=${DEADLINE:-540} SEEN=${SEEN:-$OUT}
mkdir -p "$OUT"

# The GPU suite, by how much it may find: tests of code that has seldom run on a GPU first. It takes the time that is left, and
# later calls go on with what has not passed of these sources.
SUITE=$(cat benchmarks/gpu_tests.txt)

measure() { benchmarks/measure.sh "$@"; }
grpo() { GRPO_MODELS=$1 measure grpo; }

# name, seconds that it may take, command
pieces() {
    piece decode 300 measure against
    piece suite 120 suite
    piece start 240 measure start
    piece rivals 480 measure rivals
    for i in 1 2 3; do piece "matrix$i" 520 matrix "matrix$i"; done
    piece experts 240 measure experts
    piece prefix 240 measure prefix
    piece fast_prefill 120 measure fast_prefill
    piece adapters 300 measure adapters
    piece logprobs 100 measure logprobs
    for m in qwen3-0.6b llama-1b; do piece "grpo-$m" 340 grpo "$m"; done
    piece evaluate 340 measure evaluate
    piece windows 140 measure windows
    piece updates 110 measure updates
    piece pieces 150 measure pieces
    piece mixed_windows 120 measure mixed_windows
    piece cast 110 measure cast
    piece kits 530 more kits
    piece backends 340 more kernels backends
    piece mla 210 more mla
    piece composite 210 more composite
    piece sparse 100 more sparse
    piece engines 400 measure engines
    piece grid 500 grid
    piece profile 240 measure profile
}

# These go on with what earlier calls have; they end with 3 while something is left.
suite() {
    local code
    TESTS=$(echo $SUITE) RESUME="$(earlier 'passed_*.txt') $(earlier 'h200_kits_suite_*.json')" LIMIT=$((DEADLINE - SECONDS - 10)) \
        TOTAL=$((DEADLINE - SECONDS - 10)) measure tests
    code=$?
    return $((code == 124 ? 3 : code))
}
more() { RESUME=$(earlier "h200_$1*.json") measure "${2:-$1}"; }
matrix() { NAME=$1 RESUME=$(earlier 'matrix*.json') DEADLINE=$((DEADLINE - SECONDS - 10)) benchmarks/matrix.sh; }
grid() { RESUME=$(earlier '*attention_grid.json') LIMIT=$((LIMIT - 40)) measure kernels; }

earlier() {  # files of that pattern
    local folder
    for folder in $SEEN; do compgen -G "$folder/$1"; done | tr '\n' ' '
}

seen() {  # whether a piece is done: with 0, or with anything but 3 unless RETRY is set
    local folder code
    for folder in $SEEN $OUT; do
        [[ -f $folder/$1.done ]] || continue
        code=$(cat "$folder/$1.done")
        [[ $code == 0 || -z ${RETRY:-} && $code != 3 ]] && return
    done
    return 1
}

left=()
piece() {
    local name=$1 seconds=$2 code; shift 2
    [[ -z ${ONLY:-} || " $ONLY " == *" $name "* ]] || return 0
    if [[ -n ${LIST:-} ]]; then
        echo "$name $seconds $(seen "$name" && echo done)"
    elif ! seen "$name"; then
        if ((SECONDS + seconds > DEADLINE)); then left+=("$name"); return 0; fi
        echo "==== $name, at $SECONDS s"
        LIMIT=$((seconds - 10)) TOTAL=$((seconds - 10)) "$@"; code=$?
        [[ $name == suite ]] && for log in "$OUT"/tests_*.log; do [[ -f $log ]] && mv "$log" "$OUT/$name${log#"$OUT"/tests}"; done
        echo "$code" > "$OUT/$name.done"
    fi
}

pieces
[[ -n ${LIST:-} ]] || echo "==== left: ${left[*]:-nothing}"
