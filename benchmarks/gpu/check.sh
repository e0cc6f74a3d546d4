#!/usr/bin/env bash
# Runs what needs a GPU, on a machine without network whose Python has torch with CUDA. Three calls of at most nine minutes
# each, in this order; what finds most comes first:
#   bash benchmarks/gpu/check.sh right [PYTHON]    kernels, staging, codes, training: right or wrong
#   bash benchmarks/gpu/check.sh nccl [PYTHON]     NCCL with one rank, and with two on one GPU
#   bash benchmarks/gpu/check.sh speed [PYTHON]    kernels, staging and steps against copies and DDP, with JSON of every figure
# and one beforehand, on any machine with nvcc and the same Python and torch, which may lack the GPU:
#   bash benchmarks/gpu/check.sh carry [PYTHON]    fills .gpu with a build to take along (tools/carried_build.py)
# A call uses what is in .gpu if it fits and can be imported, else it builds first, in two minutes on 16 cores.
# What it prints also goes to $OUT/gpu_check_<call>.txt where OUT names a folder, line by line; a call that is interrupted
# ends what it runs and prints its summary. Exit code 0 only if every part passed, 2 where torch sees no GPU. MINUTES=9 is what
# all parts together may take; ARCHITECTURES="9.0" compiles kernels for another GPU than the one here.
set -uo pipefail
cd "$(dirname "$0")/../.."
call=${1:-}
python=${2:-python3}
case $call in
  right | nccl | speed) ;;
  carry) exec "$python" tools/carried_build.py make ;;
  *)
    echo "gpu_check: say which call: right, nccl or speed, or carry for a build to take along" >&2
    exit 2
    ;;
esac
kill_after=15
end=$((SECONDS + ${MINUTES:-9} * 60 - kill_after))
out=${OUT:-$(mktemp -d)}
mkdir -p "$out"
exec > >(tee -i "$out/gpu_check_$call.txt") 2>&1
tee=$!
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
summary=()
failed=0
running=

leave() {  # leave STATUS: once all that was printed is in the file, which takes longer where something stayed behind
  exec >/dev/null 2>&1
  for _ in {1..50}; do
    kill -0 "$tee" || break
    sleep 0.1
  done
  exit "$1"
}

finish() {
  echo
  echo "== summary of $call"
  printf '%s\n' "${summary[@]}"
  if [ $failed -ne 0 ]; then
    echo "gpu_check $call: FAILED"
    leave 1
  fi
  echo "gpu_check $call: every part passed"
  leave 0
}

interrupted() {
  trap '' INT TERM HUP
  echo "== interrupted"
  if [ -n "$running" ]; then
    kill -INT "$running"  # timeout passes it on, and kills after a while
    wait "$running"
    note "$running_name" $((SECONDS - running_since)) "FAILED: interrupted"
  fi
  failed=1
  finish
}
trap interrupted INT TERM HUP

note() { summary+=("$(printf '%-52s %4s s  %s' "$1" "$2" "$3")"); }  # note NAME SECONDS WORDS

part() {  # part NAME SECONDS COMMAND…: run it, no longer than that nor than what is left of the whole
  local name=$1 limit=$2 begin=$SECONDS left=$((end - SECONDS)) status words
  shift 2
  [ "$limit" -le "$left" ] || limit=$left
  echo
  if [ "$limit" -lt 5 ]; then
    note "$name" 0 "not run: no time left"
    failed=1
    return 1
  fi
  echo "== $name (at most $limit s)"
  timeout -s INT --kill-after=$kill_after "$limit" "$@" 2>&1 &  # pytest ends with its summary at SIGINT
  running=$! running_name=$name running_since=$begin
  wait "$running"
  status=$?
  running=
  case $status in
    0) words=passed ;;
    124 | 137) words="FAILED: took longer than $limit s" ;;
    *) words="FAILED: exit code $status" ;;
  esac
  [ $status -eq 0 ] || failed=1
  note "$name" $((SECONDS - begin)) "$words"
  return $status
}

echo "== machine"
date -u +%FT%TZ
git log -1 --format='commit %h %s' 2>/dev/null
timeout 20 nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo "nvidia-smi finds no GPU"
nvcc --version 2>/dev/null | tail -n 2
echo "$(nproc --all) cores"
capability=$("$python" - <<'PYTHON'
import sys
try:
    import torch
except ImportError as error:
    sys.exit(f"gpu_check: {sys.executable} cannot import torch ({error})")
about = f"Python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}"
if not torch.cuda.is_available():
    sys.exit(f"gpu_check: {about} sees no GPU, and all that is checked here needs one")
capability = "%d.%d" % torch.cuda.get_device_capability()
print(f"{about}, {torch.cuda.get_device_name()}, capability {capability}", file=sys.stderr)
print(capability)
PYTHON
) || leave 2

# Kernels for this GPU alone: those for all that torch knows take minutes.
export TORCH_CUDA_ARCH_LIST=${ARCHITECTURES:-$capability}
"$python" tools/carried_build.py use || part "build" 300 "$python" tools/environment.py || {
  tail -n 60 build/build.log
  finish
}
"$python" -c 'from ringdp import _C, _build_info; print("built for CUDA", _build_info.CUDA); assert _C.has_device_codec("cuda")' || {
  note "kernels are there" 0 "FAILED"
  failed=1
  finish
}

tests=("$python" -m pytest -v --tb=short -rfE --durations=8 -p no:cacheprovider -p tests.at_once)
four=()
if "$python" -c 'import xdist' 2>/dev/null; then four=(-n 4 --dist load); fi
case $call in
  right)
    part "tests: kernels" 120 "${tests[@]}" "${four[@]}" tests/gpu/test_kernels.py
    part "tests: ring and codes" 110 "${tests[@]}" tests/gpu/test_ring_gpu.py tests/gpu/test_codes_gpu.py -k 'not nccl'
    part "tests: training and init" 110 "${tests[@]}" tests/gpu/test_training_gpu.py tests/gpu/test_init_gpu.py -k 'not nccl'
    part "digits in an elastic job, two ranks" 40 env RINGDP_CUDA=ring "$python" launch.py --elastic --nproc-per-node 2 examples/digits.py --device cuda
    part "digits on two ranks that share the GPU" 40 "$python" launch.py --nproc-per-node 2 examples/digits.py --device cuda
    if command -v compute-sanitizer >/dev/null; then
      part "kernels under compute-sanitizer" 40 compute-sanitizer --error-exitcode 9 \
        "$python" -m benchmarks gpu_kernels --elements 4099 --rounds 1 --codecs int8,int4,int6
    fi
    part "tests: GPU and CPU ranks in one job" 40 "${tests[@]}" tests/gpu/test_mixed_job_gpu.py
    ;;
  nccl)
    part "tests: two ranks over NCCL on one GPU" 150 "${tests[@]}" tests/gpu/test_nccl_pair.py
    part "tests: one rank that reduces its buckets" 120 env RINGDP_REDUCE_ALONE=1 "${tests[@]}" tests/gpu/test_{training,codes,init}_gpu.py -k nccl
    part "digits on one GPU, buckets by NCCL" 60 env RINGDP_REDUCE_ALONE=1 "$python" launch.py --nproc-per-node 1 examples/digits.py --device cuda
    part "digits on one GPU" 60 "$python" launch.py --nproc-per-node 1 examples/digits.py --device cuda
    ;;
  speed)
    part "step, host time, AMP passes against DDP" 200 env RINGDP_REDUCE_ALONE=1 "$python" -m benchmarks gpu_step --rounds 5 --json "$out/step.json"
    part "staging: two ranks on the GPU" 80 "$python" -m benchmarks staging --json "$out/staging.json"
    part "kernels: bandwidth, threshold select" 180 "$python" -m benchmarks gpu_kernels --json "$out/kernels.json"
    ;;
esac
finish
