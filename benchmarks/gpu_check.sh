#!/usr/bin/env bash
# Builds ringdp and runs what touches a GPU, in one call of at most ten minutes, on a machine without network whose Python
# has torch with CUDA:   bash benchmarks/gpu_check.sh [PYTHON]
# Without a GPU it builds, says that there is none, and runs the CPU part. Commit what it prints under docs/.
# TESTS="tests/train" chooses what pytest runs. Exit code 0 only if every part passed.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
tests=${TESTS:-tests/contract tests/fault/test_rank_death.py tests/train tests/unit/test_init.py}
failed=()

part() {  # part NAME SECONDS COMMAND…
  local name=$1 limit=$2 begin=$SECONDS
  shift 2
  echo "== $name"
  timeout --kill-after=5 "$limit" "$@" 2>&1 || failed+=("$name")
  echo "== $name took $((SECONDS - begin)) s"
}

echo "== machine"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo "no GPU: nvidia-smi finds none"
"$python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, "available", torch.cuda.is_available())'
nproc
part "build" 240 make build PYTHON="$python"
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  part "digits on one GPU, gradients by NCCL" 120 make train PYTHON="$python" ARGS="--device cuda" NPROC=1
else
  echo "== digits on one GPU: skipped, torch sees no CUDA device"
fi
part "digits on two ranks, CPU" 120 make train PYTHON="$python"
# shellcheck disable=SC2086  # several paths in one variable
part "tests" 240 make test PYTHON="$python" ARGS="-q $tests"
if [ ${#failed[@]} -gt 0 ]; then
  echo "gpu_check: failed: ${failed[*]}"
  exit 1
fi
echo "gpu_check: every part passed"
