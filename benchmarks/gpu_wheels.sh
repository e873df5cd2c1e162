#!/usr/bin/env bash
# Collect the wheels that adapters.py, evaluate.py and tests/gpu/test_qlora_gpu.py need on a GPU machine without a package index,
# where torch and transformers are installed (Python 3.12, x86-64 Linux). About 13 MB:
#
#   peft 0.21.2 (0.8 MB), accelerate 1.15.0 (0.4 MB), psutil 7.2.2 (0.2 MB)     adapters.py
#   bitsandbytes 0.50.2 (43 MB; of its kernels only those for CUDA 13 are kept, 2 MB), peft, accelerate       test_qlora_gpu.py
#   lm_eval 0.4.13 (9.1 MB), dill 0.4.1 (0.1 MB), and accelerate                evaluate.py (HFLM needs no pyarrow, no datasets)
#   nothing                                                                     grpo.py
#
#   benchmarks/gpu_wheels.sh OUT_FOLDER [more requirements ...]                 # where pip works
#   python3 -m pip install -q --no-index --no-deps --no-compile --target SITE OUT_FOLDER/*.whl; export PYTHONPATH=SITE
#
# More, to run TRL's own trainers there (needs pyarrow and xxhash too): trl==1.16.0 datasets==5.2.0 multiprocess==0.70.19
#
# The packages of the backends flash_attention (FA4) and flashmla alone, 104 MB, beside those of FlashInfer, whose einops and
# tvm-ffi FA4 needs; `split -b 48M` where less travels at a time. SITE is no folder in which Python reads .pth files:
#
#   VENDORS=1 benchmarks/gpu_wheels.sh OUT_FOLDER
#   export PYTHONPATH=SITE:SITE/nvidia_cutlass_dsl/dsl_packages
#   KITS_BACKENDS=flash_attention,flashmla benchmarks/measure.sh kits
#
# The backend cudnn needs FlashInfer's calls of 0.7.2, a wheel of 65 MB, of which it does not need flashinfer/data;
# KITS_BACKENDS=cudnn checks it:
#
#   benchmarks/gpu_wheels.sh OUT_FOLDER flashinfer-python==0.7.2.post1 apache-tvm-ffi nvidia-cudnn-frontend
set -eu
out=${1:?usage: gpu_wheels.sh OUT_FOLDER [requirement ...]}; shift
mkdir -p "$out"
platforms=()
for tag in manylinux_2_{39,35,34,31,28,27,24,17,12,5}_x86_64 manylinux2014_x86_64 manylinux2010_x86_64 manylinux1_x86_64; do
    platforms+=(--platform "$tag")
done
wheels=(peft==0.21.2 accelerate==1.15.0 psutil==7.2.2 lm_eval==0.4.13 dill==0.4.1 bitsandbytes==0.50.2)
if [[ -n ${VENDORS:-} ]]; then
    wheels=(flash-attn-4==4.0.0b36 quack-kernels==0.6.5 torch-c-dlpack-ext==0.1.5 sgl-flash-mla==1.0.0)
    for part in '' -libs-base -libs-core -libs-cu13; do wheels+=("nvidia-cutlass-dsl$part==4.8.1"); done
fi
for requirement in "${wheels[@]}" "$@"; do
    "${PY:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --abi cp312 --abi abi3 --abi none "${platforms[@]}" -d "$out" "$requirement"
done
"${PY:-python3}" - "$out" <<'EOF'
import pathlib, sys, zipfile

for path in pathlib.Path(sys.argv[1]).glob("bitsandbytes-*.whl"):
    with zipfile.ZipFile(path) as whole:
        kept = [(i, whole.read(i)) for i in whole.infolist() if not i.filename.endswith(".so") or "cuda13" in i.filename]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for info, data in kept:
            wheel.writestr(info, data)
EOF
du -sh "$out"
