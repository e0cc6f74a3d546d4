#!/usr/bin/env bash
# Builds ringdp and runs everything that needs a GPU, in one call of at most ten minutes, on a machine without network whose
# Python has torch with CUDA:   bash benchmarks/gpu_check.sh [PYTHON]
# Without a GPU it builds, says that there is none, and runs a few tests on the CPU. What it prints also goes to
# $OUT/gpu_check.txt where OUT names a folder; docs/lab/gpu_check.txt is what it printed last. Exit code 0 only if every
# part passed. MINUTES=9 is what all parts together may take; ARCHITECTURES="9.0" compiles kernels for another GPU than
# this one.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
if [ -n "${OUT:-}" ] && [ -z "${GPU_CHECK_LOGGED:-}" ]; then
  mkdir -p "$OUT"
  GPU_CHECK_LOGGED=1 bash "$0" "$@" 2>&1 | tee "$OUT/gpu_check.txt"
  exit "${PIPESTATUS[0]}"
fi
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
end=$((SECONDS + ${MINUTES:-9} * 60))
summary=()
failed=0

part() {  # part NAME SECONDS COMMAND…: run it, no longer than that nor than what is left of the whole
  local name=$1 limit=$2 begin=$SECONDS status words
  shift 2
  local left=$((end - SECONDS))
  [ "$limit" -le "$left" ] || limit=$left
  echo
  if [ "$limit" -lt 5 ]; then
    summary+=("$(printf '%-52s %6s  not run: no time left' "$name" "")")
    failed=1
    return
  fi
  echo "== $name (at most $limit s)"
  timeout --kill-after=5 "$limit" "$@" 2>&1
  status=$?
  case $status in
    0) words=passed ;;
    124 | 137) words="FAILED: took longer than $limit s" ;;
    *) words="FAILED: exit code $status" ;;
  esac
  [ $status -eq 0 ] || failed=1
  summary+=("$(printf '%-52s %4d s  %s' "$name" $((SECONDS - begin)) "$words")")
}

skip() {  # skip NAME REASON
  summary+=("$(printf '%-52s %6s  skipped: %s' "$1" "" "$2")")
}

echo "== machine"
date -u +%FT%TZ
git log -1 --format='commit %h %s' 2>/dev/null || true
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo "no GPU: nvidia-smi finds none"
nvcc --version 2>/dev/null | tail -n 2 || true
"$python" -c 'import sys, torch; print("Python", sys.version.split()[0], "torch", torch.__version__, "CUDA", torch.version.cuda, "GPU", torch.cuda.is_available())'
echo "$(nproc) cores"

gpu=no
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' && gpu=yes
if [ $gpu = yes ]; then  # kernels for this GPU alone: those for all of torch's take minutes
  export TORCH_CUDA_ARCH_LIST=${ARCHITECTURES:-$("$python" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())')}
fi
part "build" 300 make build PYTHON="$python"
if [ $gpu = yes ]; then
  part "kernels are there" 30 "$python" -c 'import torch, ringdp._build_info as info; from ringdp import _C; print("CUDA", info.CUDA); assert _C.cuda_kernels()'
  part "tests on the GPU" 200 "$python" -m pytest -q tests/gpu
  part "kernels: bandwidth, threshold select" 70 "$python" benchmarks/gpu_kernels.py
  part "staging: two ranks on the GPU, 25 MiB" 60 "$python" benchmarks/staging.py
  part "step, host time, AMP passes against DDP" 110 "$python" benchmarks/gpu_step.py --rounds 5
  part "digits on one GPU, gradients by NCCL" 60 "$python" launch.py --nproc-per-node 1 examples/digits.py --device cuda
  part "digits on two ranks that share the GPU" 60 "$python" launch.py --nproc-per-node 2 examples/digits.py --device cuda
else
  echo
  echo "torch sees no CUDA device: what needs one is skipped"
  for name in "tests on the GPU" "kernels: bandwidth, threshold select" "staging: two ranks on the GPU, 25 MiB" \
    "step, host time, AMP passes against DDP" "digits on one GPU, gradients by NCCL" "digits on two ranks that share the GPU"; do
    skip "$name" "torch sees no CUDA device"
  done
  part "tests on the CPU" 120 "$python" -m pytest -q tests/unit/test_devices.py tests/unit/test_cuda_toolkit.py tests/gpu
  part "digits on two ranks, CPU" 60 "$python" launch.py --nproc-per-node 2 examples/digits.py
fi

echo
echo "== summary"
printf '%s\n' "${summary[@]}"
if [ $failed -ne 0 ]; then
  echo "gpu_check: FAILED"
  exit 1
fi
echo "gpu_check: every part passed"
