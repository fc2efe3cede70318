#!/usr/bin/env bash
# Train on all GPUs of this node, or of several:
#   launch/torchrun.sh [torchrun options --] <flags of run_vit_training.py>
# Several nodes: the same command on each, with NNODES, MASTER_ADDR and either NODE_RANK (0, 1, ...)
# or, for nodes that number themselves and may be restarted, RDZV_ID (the same string on all).
# Also from the environment: NPROC_PER_NODE (default: all GPUs), MASTER_PORT (29500),
# MAX_RESTARTS (0), PYTHON (python3).
set -euo pipefail

fail() {
    echo "torchrun.sh: error: $*" >&2
    exit 2
}

positive() { # positive NAME VALUE
    [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "$1=$2 is not a positive number"
}

options=() # torchrun's: what stands before the first --
for ((i = 1; i <= $#; i++)); do
    if [[ ${!i} == -- ]]; then
        options=("${@:1:i-1}")
        shift "$i"
        break
    fi
done

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
command -v "$python" > /dev/null || fail "$python not found: set PYTHON"

nnodes=${NNODES:-1}
positive NNODES "$nnodes"
meeting=(--nnodes "$nnodes")
if ((nnodes == 1)); then
    # A free port, so that two runs on one machine do not meet.
    meeting+=(--rdzv-backend c10d --rdzv-endpoint localhost:0)
else
    [[ -n ${MASTER_ADDR:-} ]] || fail "NNODES=$nnodes needs MASTER_ADDR, the first node's address"
    port=${MASTER_PORT:-29500}
    positive MASTER_PORT "$port"
    if [[ -n ${RDZV_ID:-} ]]; then
        meeting+=(--rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$port" --rdzv-id "$RDZV_ID")
    else
        rank=${NODE_RANK:-}
        [[ $rank =~ ^(0|[1-9][0-9]*)$ ]] && ((rank < nnodes)) ||
            fail "NNODES=$nnodes needs NODE_RANK of 0 to $((nnodes - 1)) (this is '$rank') or RDZV_ID"
        meeting+=(--node-rank "$rank" --master-addr "$MASTER_ADDR" --master-port "$port")
    fi
fi

processes=${NPROC_PER_NODE:-}
if [[ -z $processes ]]; then
    # PyTorch's own count, not nvidia-smi's: it heeds CUDA_VISIBLE_DEVICES and a missing driver.
    processes=$("$python" -c 'import torch; print(torch.cuda.device_count())' 2> /dev/null) ||
        fail "$python has no PyTorch: $python -m pip install -r requirements-gpu.txt, or set PYTHON"
    ((processes > 0)) ||
        fail "PyTorch sees no GPU here: set NPROC_PER_NODE to train on the CPU, with gloo"
fi
positive NPROC_PER_NODE "$processes"

# What the user has set stays as it is.
# torchrun would set 1 thread a process, and leave most cores idle that compute on the host (AdamW
# under --cpu_offload, checkpoints).
threads=$(($(nproc) / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
# Gathered blocks of changing sizes break fixed segments into pieces that fit nothing: grow them
# instead. PyTorch 2.9 warns of the older name, PYTORCH_CUDA_ALLOC_CONF.
if [[ -z ${PYTORCH_CUDA_ALLOC_CONF:-} ]]; then
    export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
fi
# NCCL is silent by default: this prints why a connection failed, nothing else. Which network
# interface nodes share only the user knows: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

# The last of two equal options wins: the user's come after these.
exec "$python" -m torch.distributed.run "${meeting[@]}" --nproc-per-node "$processes" \
    --max-restarts "${MAX_RESTARTS:-0}" ${options[@]+"${options[@]}"} \
    "$root/run_vit_training.py" --backend cuda "$@"
