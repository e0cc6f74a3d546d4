#!/usr/bin/env bash
# Runs what needs a GPU, on a machine without network whose Python has torch with CUDA. Two calls of at most four and a half
# minutes each, so that a quarter of an hour on a machine is enough:
#   bash benchmarks/gpu/check.sh right [PYTHON]    all that is right or wrong, parts beside each other on 16 cores
#   bash benchmarks/gpu/check.sh speed [PYTHON]    steps, kernels and staging against DDP and copies, with JSON of every figure
# and one beforehand, on any machine with nvcc and the same Python and torch, which may lack the GPU:
#   bash benchmarks/gpu/check.sh carry [PYTHON]    fills .gpu with a build to take along (tools/carried_build.py)
# A call uses what is in .gpu if it fits and can be imported, else it builds first, in two minutes on 16 cores: MINUTES=7 then.
# What it prints also goes to $OUT/gpu_check_<call>.txt where OUT names a folder: of `speed` line by line, of `right` each part
# when that ends. A call that is interrupted ends what it runs, prints its output and the summary. Exit code 0 only if every
# part passed, 2 where torch sees no GPU. MINUTES=4.5 is what all parts together may take; ARCHITECTURES="9.0" compiles kernels
# for another GPU than the one here.
set -uo pipefail
cd "$(dirname "$0")/../.."
call=${1:-}
python=${2:-python3}
case $call in
  right | speed) ;;
  carry) exec "$python" tools/carried_build.py make ;;
  *)
    echo "gpu_check: say which call: right or speed, or carry for a build to take along" >&2
    exit 2
    ;;
esac
kill_after=15
end=$((SECONDS + $(awk "BEGIN { print int(60 * ${MINUTES:-4.5}) }") - kill_after))
parts=$(mktemp -d)  # for what the parts print that run beside each other
out=${OUT:-$(mktemp -d)}
mkdir -p "$out"
exec > >(tee -i "$out/gpu_check_$call.txt") 2>&1
tee=$!
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PATH=$PATH:/usr/local/cuda/bin  # compute-sanitizer, nvcc
summary=()
failed=0
declare -A name_of limit_of since_of  # of the parts that run, by their process

leave() {  # leave STATUS: once all that was printed is in the file, which takes longer where something stayed behind
  exec >/dev/null 2>&1
  rm -rf "$parts"
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
  local process status
  trap '' INT TERM HUP
  echo "== interrupted"
  for process in "${!name_of[@]}"; do kill -INT "$process" 2>/dev/null; done  # timeout passes it on, and kills after a while
  for process in "${!name_of[@]}"; do
    wait "$process"
    status=$?
    ended "$process" $status "FAILED: interrupted"
  done
  failed=1
  finish
}
trap interrupted INT TERM HUP

note() { summary+=("$(printf '%-52s %4s s  %s' "$1" "$2" "$3")"); }  # note NAME SECONDS WORDS

begin() {  # begin FILE NAME SECONDS COMMAND…: start it, for no longer than that nor than what is left of the whole
  local file=$1 name=$2 limit=$3 left=$((end - SECONDS))
  shift 3
  [ "$limit" -le "$left" ] || limit=$left
  if [ "$limit" -lt 5 ]; then
    note "$name" 0 "not run: no time left"
    failed=1
    return 1
  fi
  echo "== $name (at most $limit s)"
  timeout -s INT --kill-after=$kill_after "$limit" "$@" >"$file" 2>&1 &  # pytest ends with its summary at SIGINT
  name_of[$!]=$name limit_of[$!]=$limit since_of[$!]=$SECONDS
}

ended() {  # ended PROCESS STATUS [WORDS]: into the summary, and what it printed, if that went to a file
  local process=$1 status=$2 name=${name_of[$1]} seconds=$((SECONDS - since_of[$1])) words=${3:-}
  case $words$status in
    0) words=passed ;;
    124 | 137) words="FAILED: took longer than ${limit_of[$process]} s" ;;
    "$status") words="FAILED: exit code $status" ;;
  esac
  [ "$status" -eq 0 ] || failed=1
  note "$name" $seconds "$words"
  unset "name_of[$process]"
  if [ -f "$parts/$name" ]; then
    printf '\n== %s, after %s s: %s\n' "$name" $seconds "$words"
    cat "$parts/$name"
    rm "$parts/$name"
  fi
}

part() {  # part NAME SECONDS COMMAND…: run it, its lines as they come
  local status
  echo
  begin /dev/stdout "$@" || return 1
  wait $!
  status=$?
  ended $! $status
  return $status
}

beside() { begin "$parts/$1" "$@"; }  # beside NAME SECONDS COMMAND…: run it, and go on at once

all_ended() {
  local process status
  while [ ${#name_of[@]} -gt 0 ]; do
    wait -n -p process "${!name_of[@]}"
    status=$?
    ended "$process" $status
  done
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

tests=("$python" -m pytest -v --tb=short -rfEs --durations=8 -p no:cacheprovider -p tests.at_once)
xdist=  # how a part's tests are spread over processes
if "$python" -c 'import xdist' 2>/dev/null; then xdist=yes; fi
job=(env OMP_NUM_THREADS=1 "$python" launch.py)
case $call in
  right)
    beside "tests: kernels" 110 "${tests[@]}" ${xdist:+-n 4} tests/gpu/test_{kernels,sparse_gpu}.py
    beside "tests: training" 110 "${tests[@]}" ${xdist:+-n 4} tests/gpu/test_training_gpu.py
    beside "tests: ring, codes, init, ranks on CPUs" 110 "${tests[@]}" ${xdist:+-n 3} -k 'not nccl' \
      tests/gpu/test_{ring_gpu,codes_gpu,init_gpu,mixed_job_gpu}.py
    beside "tests: elastic jobs" 110 "${tests[@]}" ${xdist:+-n 3} tests/gpu/test_elastic_gpu.py
    all_ended
    beside "tests: two ranks over NCCL" 115 "${tests[@]}" ${xdist:+-n 2} tests/gpu/test_nccl_pair.py
    beside "tests: one rank that reduces over NCCL" 115 env RINGDP_REDUCE_ALONE=1 "${tests[@]}" ${xdist:+-n 3} -k nccl \
      tests/gpu/test_{training,codes,init}_gpu.py
    beside "tests: memory, many streams, an assert" 115 "${tests[@]}" ${xdist:+-n 2} tests/gpu/test_device_gpu.py
    mapfile -t written_for_cpus < <("$python" - <<'PYTHON'
from tests.fake_cuda.__main__ import NOT_ALIKE, TRAINING

print("-k", NOT_ALIKE, *TRAINING, sep="\n")
PYTHON
    )
    beside "tests: training, written for CPUs" 115 env RINGDP_TEST_DEVICE=cuda RINGDP_TEST_BACKENDS=ring \
      "${tests[@]}" ${xdist:+-n 4} "${written_for_cpus[@]}"
    beside "digits: elastic, two ranks" 60 env RINGDP_CUDA=ring "${job[@]}" --elastic --nproc-per-node 2 examples/digits.py --device cuda
    beside "digits: two ranks" 60 "${job[@]}" --nproc-per-node 2 examples/digits.py --device cuda
    beside "digits: one rank, by NCCL" 60 env RINGDP_REDUCE_ALONE=1 "${job[@]}" --nproc-per-node 1 examples/digits.py --device cuda
    if command -v compute-sanitizer >/dev/null; then
      kernels=("$python" -m benchmarks gpu_kernels --rounds 1 --codecs)
      beside "kernels: compute-sanitizer, memory" 90 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 \
        "${kernels[@]}" int8,int4,int6,nf4 --elements 4099
      beside "kernels: compute-sanitizer, races" 90 compute-sanitizer --tool racecheck --error-exitcode 9 \
        "${kernels[@]}" int6,nf4 --elements 100003
    else
      note "kernels: compute-sanitizer" 0 "not run: not found"
    fi
    all_ended
    ;;
  speed)
    part "step, host time, AMP passes against DDP" 130 env RINGDP_REDUCE_ALONE=1 "$python" -m benchmarks gpu_step \
      --rounds 5 --steps 8 --json "$out/step.json"
    part "kernels: bandwidth, threshold select" 45 "$python" -m benchmarks gpu_kernels \
      --elements 124m --rounds 15 --json "$out/kernels.json"
    part "staging: two ranks on the GPU" 45 "$python" -m benchmarks staging --calls 12 --json "$out/staging.json"
    ;;
esac
finish
