#!/usr/bin/env bash
# All measurements that need a GPU, in the order of their worth, each a file in a folder of results.
#
#   bash benchmarks/gpu_day.sh OUT [FOLDER]
#
# FOLDER has `packages`, which are on the path of Python then, and `data` with TinyStories and
# WikiText-2, since the card may have no network. A step is ended after LIMIT seconds (570). Run the
# script again to go on: finished steps are skipped, and training resumes. Without a GPU, or with
# SMALL=1, every step has small numbers, to try the script.
set -u
out=${1:?"expected a folder for results: bash benchmarks/gpu_day.sh OUT [FOLDER]"}
folder=${2:-}
cd "$(dirname "$0")/.." && mkdir -p "$out" && out=$(cd "$out" && pwd)
export PYTHONPATH=$PWD/src:$PWD${folder:+:$folder/packages}${PYTHONPATH:+:$PYTHONPATH}
export BILENS_DATA=${BILENS_DATA:-${folder:+$folder/data}} HF_HUB_OFFLINE=1
python=${PYTHON:-python}
gpu=$("$python" -c 'import torch; print(int(torch.cuda.is_available()))')
small=${SMALL:-$((1 - gpu))}
scale=$([ "$small" = 1 ] && echo small || echo paper)
failed=0

pick() { # the first argument with small numbers, else the second
  [ "$small" = 1 ] && echo "$1" || echo "$2"
}

step() { # name, then a command: its output goes to a file, as it comes
  local name=$1 start=$SECONDS status
  shift
  if [ -e "$out/$name.done" ]; then
    echo "$name: done before"
    return
  fi
  { echo "\$ $*"; date -u; } >>"$out/$name.txt"
  timeout -s INT -k 20 "${LIMIT:-570}" "$@" >>"$out/$name.txt" 2>&1
  status=$?
  if [ $status = 0 ]; then touch "$out/$name.done"; else failed=1; fi
  echo "$name: status $status after $((SECONDS - start)) s"
}

# Words of these variables are arguments of their own.
# shellcheck disable=SC2046
{
  step kernels "$python" -m pytest -n 0 -q -p no:cacheprovider tests/kernels/test_triton.py \
    $(pick "-k goes_on_from_a_state" "")
  step tensorise "$python" -m bilens reproduce tensorise --scale "$scale" \
    --output "$out/reproduced"
  step attention "$python" -m benchmarks.gpu
  step flow "$python" -m benchmarks.flow_time $(pick "--tokens 4 --turns 1" "")
  step flow_1b "$python" -m benchmarks.flow_time --llama \
    $(pick "64 128 2 --tokens 4 --turns 1" "2048 8192 16 --tokens 8 32 128 --turns 3")
  smollm2=$("$python" -c 'from tests.real.packages import *; print(gguf_file(SMOLLM2))')
  step circuit "$python" -m bilens circuit "$smollm2" --keep "$(pick 0.3 0.9)" \
    --prompt "The keys to the cabinet" --against "The key to the cabinet" --token " are" --minus " is"
}
exit $failed
