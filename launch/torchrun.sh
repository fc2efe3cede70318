#!/usr/bin/env bash
# Train on all GPUs of this node, or of several nodes; with --backend torchtpu on all TPU devices of
# this host, or of all hosts of a slice:
#   launch/torchrun.sh [torchrun options --] <flags of run_vit_training.py>
# Several nodes: run the same command on each node, with NNODES, MASTER_ADDR and either NODE_RANK
# (0, 1, ...) or RDZV_ID (a secret word, the same on all nodes, such as `openssl rand -hex 16` prints;
# they number themselves, and may be restarted one by one). Before torchrun starts, the nodes wait for
# each other: every 10 s each one prints which nodes are missing, and after JOIN_TIMEOUT seconds (600;
# 0: never) all exit with code 1. Their network must be one that only trusted programs reach.
# NNODES=MIN:MAX with RDZV_ID: train on any number of nodes from MIN to MAX. Training starts
# ELASTIC_WAIT seconds (300) after MIN nodes have joined, or as soon as MAX have. If a node is lost,
# the others continue in the same way. If a node joins later, the others save a checkpoint and all
# restart with it. Pass --micro_batch_size. The node at MASTER_ADDR must stay.
# Hosts of a TPU slice are numbered by NODE_RANK and find each other by NODE_ADDRESSES (the addresses
# of all hosts in that order, separated by commas) and TORCH_TPU_TOPOLOGY (chips along x, y and z,
# such as 4,4,1). launch.xla_dist sets all of these; on GKE they are derived from GKE's variables.
# Other environment variables: NPROC_PER_NODE (default: all GPUs or TPU devices); MASTER_PORT (29500);
# MAX_RESTARTS (0): how often to restart all processes after one fails, from the newest checkpoint;
# STEP_TIMEOUT_S (1800; 0: off): default of --step_timeout_s, which turns a hang into a failure;
# PYTHON (python3).
# Exit code: 0; 2 to 5 if the program exited with that code, after which a restart does not help;
# 128 + n after signal n; otherwise 1.
set -euo pipefail

fail() {
    echo "torchrun.sh: error: $*" >&2
    exit 2
}

whole() { # whole VARIABLE NAME LEAST MOST: check a number, and take its leading zeros away
    [[ ${!1} =~ ^[0-9]{1,9}$ ]] && ((10#${!1} >= $3 && 10#${!1} <= $4)) ||
        fail "$2=${!1} must be a whole number from $3 to $4"
    printf -v "$1" %d "$((10#${!1}))"
}

options=() # for torchrun: the arguments before the first --
for ((i = 1; i <= $#; i++)); do
    if [[ ${!i} == -- ]]; then
        options=("${@:1:i-1}")
        shift "$i"
        break
    fi
done

backend=cuda # the last one counts, as in the program
for ((i = 1; i <= $#; i++)); do
    next=$((i + 1))
    case ${!i} in
        --backend=*) backend=${!i#*=} ;;
        --backend) backend=${!next:-} ;;
    esac
done

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
command -v "$python" > /dev/null || fail "$python not found: set PYTHON"

if [[ $backend == torchtpu ]]; then
    [[ -z ${RDZV_ID:-} ]] || fail "--backend torchtpu requires NODE_RANK instead of RDZV_ID"
    if [[ -z ${NNODES:-} && ${TPU_WORKER_HOSTNAMES:-} == *,* ]]; then
        # On GKE: the hosts of this slice, with one slice or several.
        commas=${TPU_WORKER_HOSTNAMES//[^,]/}
        hosts=$((${#commas} + 1))
        slices=${MEGASCALE_NUM_SLICES:-1} slice=${MEGASCALE_SLICE_ID:-0} worker=${TPU_WORKER_ID:-0}
        whole slices MEGASCALE_NUM_SLICES 1 100000
        whole slice MEGASCALE_SLICE_ID 0 100000
        whole worker TPU_WORKER_ID 0 100000
        NNODES=$((hosts * slices))
        NODE_RANK=$((hosts * slice + worker))
        MASTER_ADDR=${MEGASCALE_COORDINATOR_ADDRESS:-$TPU_WORKER_HOSTNAMES}
        MASTER_ADDR=${MASTER_ADDR%%[:,]*}
    fi
    [[ -z ${NODE_ADDRESSES:-} ]] || export TPU_WORKER_HOSTNAMES=$NODE_ADDRESSES
fi
nnodes=${NNODES:-1} port=${MASTER_PORT:-29500} rank=${NODE_RANK:-} least=
unset ELASTIC_NODES
if [[ $nnodes == *:* ]]; then
    least=${nnodes%%:*} nnodes=${nnodes#*:}
    [[ $least:$nnodes =~ ^[0-9]{1,5}:[0-9]{1,5}$ ]] && ((0 < 10#$least && 10#$least <= 10#$nnodes)) ||
        fail "NNODES=$NNODES must be MIN:MAX, whole numbers from 1 to 99999 with MIN <= MAX"
    whole least NNODES 1 99999
fi
whole nnodes NNODES 1 100000
whole port MASTER_PORT 1 65535
JOIN_TIMEOUT=${JOIN_TIMEOUT:-600} MAX_RESTARTS=${MAX_RESTARTS:-0} STEP_TIMEOUT_S=${STEP_TIMEOUT_S:-1800}
whole JOIN_TIMEOUT JOIN_TIMEOUT 0 100000000
whole MAX_RESTARTS MAX_RESTARTS 0 1000000
whole STEP_TIMEOUT_S STEP_TIMEOUT_S 0 100000000
if ((nnodes > 1)); then
    [[ -n ${MASTER_ADDR:-} ]] || fail "NNODES=$nnodes requires MASTER_ADDR, the address of the first node"
    [[ $MASTER_ADDR =~ ^[[:alnum:].:_-]+$ ]] || fail "MASTER_ADDR=$MASTER_ADDR is not an address"
    if [[ -n $least ]]; then
        [[ -n ${RDZV_ID:-} ]] ||
            fail "NNODES=$NNODES requires RDZV_ID instead of NODE_RANK, because joining nodes number themselves"
        ELASTIC_WAIT=${ELASTIC_WAIT:-300}
        whole ELASTIC_WAIT ELASTIC_WAIT 0 100000000
        ((JOIN_TIMEOUT == 0 || ELASTIC_WAIT < JOIN_TIMEOUT)) ||
            fail "ELASTIC_WAIT=$ELASTIC_WAIT must be less than JOIN_TIMEOUT=$JOIN_TIMEOUT"
        export ELASTIC_NODES=$least:$nnodes
    fi
    if [[ -z ${RDZV_ID:-} ]]; then
        [[ $rank =~ ^[0-9]{1,9}$ ]] && ((10#$rank < nnodes)) ||
            fail "NNODES=$nnodes requires RDZV_ID, or NODE_RANK from 0 to $((nnodes - 1)), not '$rank'"
        whole rank NODE_RANK 0 100000
    fi
fi

processes=${NPROC_PER_NODE:-}
if [[ -z $processes && $backend == torchtpu ]]; then
    devices=(/dev/vfio/[0-9]*) # as TorchTPU counts them: two per TPU7x chip, else one per chip
    [[ -e ${devices[0]} ]] || fail "no TPU found in /dev/vfio: set NPROC_PER_NODE"
    processes=${#devices[@]}
elif [[ -z $processes ]]; then
    # PyTorch's count, unlike nvidia-smi's, respects CUDA_VISIBLE_DEVICES and a missing driver.
    processes=$("$python" -c 'import torch; print(torch.cuda.device_count())' 2> /dev/null) ||
        fail "$python cannot import PyTorch: $python -m pip install -r requirements-gpu.txt, or set PYTHON"
    ((processes > 0)) ||
        fail "PyTorch finds no GPU: set NPROC_PER_NODE to train on the CPU with gloo"
fi
whole processes NPROC_PER_NODE 1 256

# Variables that the user has set are kept.
# torchrun would set 1 thread per process, which leaves most cores idle during work on the host
# (AdamW with --cpu_offload, checkpoints).
threads=$(($(nproc) / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
[[ $OMP_NUM_THREADS =~ ^[1-9][0-9]{0,4}(,[1-9][0-9]{0,4})*$ ]] ||
    fail "OMP_NUM_THREADS=$OMP_NUM_THREADS must be a number of threads, or several separated by commas"
if [[ $backend != torchtpu ]]; then
    # Gathered blocks of varying sizes fragment fixed segments; expandable segments avoid this.
    # PyTorch 2.9 warns about the older name, PYTORCH_CUDA_ALLOC_CONF.
    if [[ -z ${PYTORCH_CUDA_ALLOC_CONF:-} ]]; then
        export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
    fi
    # NCCL is silent by default; WARN prints why a connection failed and nothing else. Only the user
    # knows which network interface the nodes share: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME.
    export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
fi
export STEP_TIMEOUT_S JOIN_TIMEOUT
export TORCHRUN_PID=$$ # this process becomes torchrun; its child processes end with it

# The last of two equal options counts: the user's come after these.
words=(--nproc-per-node "$processes" --max-restarts "$MAX_RESTARTS" ${options[@]+"${options[@]}"}
    "$root/run_vit_training.py" --backend cuda "$@")
tpu=()
[[ $backend != torchtpu ]] || tpu=(--torchtpu "$processes")
if ((nnodes == 1)); then
    # Other hosts have nothing to say to its processes.
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
    [[ $backend == torchtpu ]] || export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
    # By the job's id the program detects a restart, and then resumes whatever --resume is set to.
    # Several nodes agree on one id.
    export RUN_JOB_ID=${RUN_JOB_ID:-$(uname -n)-$(date +%Y%m%d-%H%M%S)-$$}
    exec "$python" "$root/launch/torchrun.py" --nodes 1 ${tpu[@]+"${tpu[@]}"} -- "${words[@]}"
fi
who=(--rank "$rank")
if [[ -n ${RDZV_ID:-} ]]; then # in the environment alone: ps shows everybody all arguments
    export RDZV_ID
    who=(--rdzv_id)
fi
[[ -z $least ]] || who+=(--least "$least" --elastic_wait "$ELASTIC_WAIT")
exec "$python" "$root/launch/torchrun.py" --nodes "$nnodes" "${who[@]}" --address="$MASTER_ADDR" \
    --port "$port" --limit "$JOIN_TIMEOUT" ${tpu[@]+"${tpu[@]}"} -- "${words[@]}"
