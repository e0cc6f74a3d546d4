#!/usr/bin/env bash
# Builds ringdp and runs what needs a GPU, on a machine without network whose Python has torch with CUDA. Three calls of at most
# nine minutes each, in this order; what finds most comes first:
#   bash benchmarks/gpu_check.sh right [PYTHON]    kernels, staging, codes, training: right or wrong
#   bash benchmarks/gpu_check.sh nccl [PYTHON]     NCCL with one rank, and with two on one GPU
#   bash benchmarks/gpu_check.sh speed [PYTHON]    kernels, staging and steps against copies and DDP, with JSON of every figure
# A build that was made elsewhere for this Python and torch (_C*.so and _build_info.py of ringdp/, _core*.so of tests/core/, in .gpu/) is used if it can be
# imported. Without a GPU it builds, says that there is none, and runs a few tests on the CPU. What it prints also goes to
# $OUT/gpu_check_<call>.txt where OUT names a folder, line by line, so that a call that is cut short loses nothing. Exit code 0
# only if every part passed. MINUTES=9 is what all parts together may take; ARCHITECTURES="9.0" compiles kernels for another GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
call=${1:-}
python=${2:-python3}
case $call in
  right | nccl | speed) ;;
  *)
    echo "gpu_check: say which call: right, nccl or speed" >&2
    exit 2
    ;;
esac
out=${OUT:-$(mktemp -d)}
if [ -z "${GPU_CHECK_LOGGED:-}" ]; then
  mkdir -p "$out"
  GPU_CHECK_LOGGED=1 OUT=$out bash "$0" "$@" 2>&1 | tee "$out/gpu_check_$call.txt"
  exit "${PIPESTATUS[0]}"
fi
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
end=$((SECONDS + ${MINUTES:-9} * 60))
tests=("$python" -m pytest -v --tb=short -rfE --durations=8 -p no:cacheprovider)
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
    return 1
  fi
  echo "== $name (at most $limit s)"
  timeout -s INT --kill-after=20 "$limit" "$@" 2>&1  # pytest ends with its summary at SIGINT
  status=$?
  case $status in
    0) words=passed ;;
    124 | 137) words="FAILED: took longer than $limit s" ;;
    *) words="FAILED: exit code $status" ;;
  esac
  [ $status -eq 0 ] || failed=1
  summary+=("$(printf '%-52s %4d s  %s' "$name" $((SECONDS - begin)) "$words")")
  return $status
}

finish() {
  echo
  echo "== summary of $call"
  printf '%s\n' "${summary[@]}"
  if [ $failed -ne 0 ]; then
    echo "gpu_check $call: FAILED"
    exit 1
  fi
  echo "gpu_check $call: every part passed"
  exit 0
}

echo "== machine"
date -u +%FT%TZ
git log -1 --format='commit %h %s' 2>/dev/null || true
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo "no GPU: nvidia-smi finds none"
nvcc --version 2>/dev/null | tail -n 2 || true
"$python" -c 'import sys, torch; print("Python", sys.version.split()[0], "torch", torch.__version__, "CUDA", torch.version.cuda, "GPU", torch.cuda.is_available())'
echo "$(nproc --all) cores"

gpu=no
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' && gpu=yes
carried=no
if [ -d .gpu ]; then
  cp .gpu/_C*.so .gpu/_build_info.py ringdp/
  cp .gpu/_core*.so tests/core/
  if "$python" -c 'from ringdp import _C; assert _C.cuda_kernels()'; then
    carried=yes
    echo "the build in .gpu is used"
  else
    rm -f ringdp/_C*.so ringdp/_build_info.py tests/core/_core*.so
  fi
fi
if [ $carried = no ]; then
  if [ $gpu = yes ]; then  # kernels for this GPU alone: those for all of torch's take minutes
    export TORCH_CUDA_ARCH_LIST=${ARCHITECTURES:-$("$python" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())')}
  fi
  part "build" 300 "$python" tools/environment.py || {
    tail -n 60 build/build.log
    finish
  }
fi
if [ $gpu = no ]; then
  echo
  echo "torch sees no CUDA device: what needs one is skipped"
  summary+=("$(printf '%-52s %6s  skipped: torch sees no CUDA device' "what '$call' runs on a GPU" "")")
  part "tests on the CPU" 120 "$python" -m pytest -q tests/unit/test_devices.py tests/unit/test_cuda_toolkit.py tests/gpu
  part "digits on two ranks, CPU" 60 "$python" launch.py --nproc-per-node 2 examples/digits.py
  finish
fi
part "kernels are there" 30 "$python" -c 'import torch, ringdp._build_info as info; from ringdp import _C; print("CUDA", info.CUDA); assert _C.cuda_kernels()' || finish

case $call in
  right)
    if command -v compute-sanitizer >/dev/null; then
      part "kernels under compute-sanitizer" 60 compute-sanitizer --error-exitcode 9 \
        "$python" benchmarks/gpu_kernels.py --elements 4099 --rounds 1 --codecs int8,int4,int6
    fi
    part "tests: kernels, in four processes" 130 "${tests[@]}" -n 4 --dist load tests/gpu/test_kernels.py
    part "tests: ring and codes" 110 "${tests[@]}" tests/gpu/test_ring_gpu.py tests/gpu/test_codes_gpu.py
    part "tests: training and init" 120 "${tests[@]}" tests/gpu/test_training_gpu.py tests/gpu/test_init_gpu.py
    part "digits in an elastic job, two ranks" 60 env RINGDP_CUDA=ring "$python" launch.py --elastic --nproc-per-node 2 examples/digits.py --device cuda
    part "digits on two ranks that share the GPU" 60 "$python" launch.py --nproc-per-node 2 examples/digits.py --device cuda
    part "tests: GPU and CPU ranks in one job" 60 "${tests[@]}" tests/gpu/test_mixed_job_gpu.py
    ;;
  nccl)
    part "tests: one rank that reduces its buckets" 90 env RINGDP_REDUCE_ALONE=1 "${tests[@]}" tests/gpu/test_training_gpu.py -k 'nccl or NCCL'
    part "tests: two ranks over NCCL on one GPU" 150 "${tests[@]}" tests/gpu/test_nccl_pair.py
    part "digits on one GPU, buckets by NCCL" 60 env RINGDP_REDUCE_ALONE=1 "$python" launch.py --nproc-per-node 1 examples/digits.py --device cuda
    part "digits on one GPU" 60 "$python" launch.py --nproc-per-node 1 examples/digits.py --device cuda
    ;;
  speed)
    part "kernels: bandwidth, threshold select" 90 "$python" benchmarks/gpu_kernels.py --json "$out/kernels.json"
    part "staging: two ranks on the GPU" 80 "$python" benchmarks/staging.py --json "$out/staging.json"
    part "step, host time, AMP passes against DDP" 200 env RINGDP_REDUCE_ALONE=1 "$python" benchmarks/gpu_step.py --rounds 5 --json "$out/step.json"
    ;;
esac
finish
