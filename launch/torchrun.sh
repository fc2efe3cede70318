#!/usr/bin/env bash
# Train on all GPUs of this node, or of several; with --backend torchtpu on all TPU devices of this
# host, or of all hosts of a slice:
#   launch/torchrun.sh [torchrun options --] <flags of run_vit_training.py>
# Several nodes: the same command on each, with NNODES, MASTER_ADDR and either NODE_RANK (0, 1, ...)
# or, for nodes that number themselves and may be restarted one by one, RDZV_ID (the same string on
# all). Before torchrun starts they wait for each other: every 10 s each prints which are missing;
# after JOIN_TIMEOUT seconds (600; 0: never) they end with code 1.
# NNODES=MIN:MAX, with RDZV_ID: any number of nodes from MIN to MAX trains. They start ELASTIC_WAIT
# seconds (300) after MIN of them are there, or as soon as MAX are. The same if one is lost; one that
# comes later is taken in: the others write a checkpoint, and all start again with it. Give
# --micro_batch_size. The node at MASTER_ADDR must stay.
# The hosts of a TPU slice are numbered by NODE_RANK, and know of each other by NODE_ADDRESSES (all
# of them, with commas, in that order) and TORCH_TPU_TOPOLOGY (the slice's chips along x, y and z,
# as 4,4,1). launch.xla_dist sets all of these; on GKE they follow from what GKE sets.
# Also from the environment: NPROC_PER_NODE (default: all GPUs or TPU devices), MASTER_PORT (29500),
# MAX_RESTARTS (0): starts all processes again after one failed, from the newest checkpoint;
# STEP_TIMEOUT_S (1800; 0: off): the default of --step_timeout_s, so that a hang is a failure, too;
# PYTHON (python3).
# Exit code: 0; 2 to 5 if the program ended with that, after which no restart helps; 128 + n after
# signal n; else 1.
set -euo pipefail

fail() {
    echo "torchrun.sh: error: $*" >&2
    exit 2
}

whole() { # whole NAME VALUE LEAST MOST
    [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] && (($2 >= $3 && $2 <= $4)) ||
        fail "$1=$2 is not a whole number of $3 to $4"
}

options=() # torchrun's: what stands before the first --
for ((i = 1; i <= $#; i++)); do
    if [[ ${!i} == -- ]]; then
        options=("${@:1:i-1}")
        shift "$i"
        break
    fi
done

backend=cuda # of several the last, as the program takes it
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
    [[ -z ${RDZV_ID:-} ]] || fail "--backend torchtpu requires NODE_RANK in place of RDZV_ID"
    if [[ -z ${NNODES:-} && ${TPU_WORKER_HOSTNAMES:-} == *,* ]]; then
        # GKE: the hosts of this slice, of one or several.
        commas=${TPU_WORKER_HOSTNAMES//[^,]/}
        hosts=$((${#commas} + 1))
        NNODES=$((hosts * ${MEGASCALE_NUM_SLICES:-1}))
        NODE_RANK=$((hosts * ${MEGASCALE_SLICE_ID:-0} + ${TPU_WORKER_ID:-0}))
        MASTER_ADDR=${MEGASCALE_COORDINATOR_ADDRESS:-$TPU_WORKER_HOSTNAMES}
        MASTER_ADDR=${MASTER_ADDR%%[:,]*}
    fi
    [[ -z ${NODE_ADDRESSES:-} ]] || export TPU_WORKER_HOSTNAMES=$NODE_ADDRESSES
fi
nnodes=${NNODES:-1} port=${MASTER_PORT:-29500} rank=${NODE_RANK:-} least=
unset ELASTIC_NODES
if [[ $nnodes == *:* ]]; then
    least=${nnodes%%:*} nnodes=${nnodes#*:}
    [[ $least:$nnodes =~ ^[1-9][0-9]{0,4}:[1-9][0-9]{0,4}$ ]] && ((least <= nnodes)) ||
        fail "NNODES=$NNODES is not MIN:MAX, whole numbers of 1 to 99999, MIN not above MAX"
fi
whole NNODES "$nnodes" 1 100000
whole MASTER_PORT "$port" 1 65535
whole JOIN_TIMEOUT "${JOIN_TIMEOUT:=600}" 0 100000000
whole MAX_RESTARTS "${MAX_RESTARTS:=0}" 0 1000000
whole STEP_TIMEOUT_S "${STEP_TIMEOUT_S:=1800}" 0 100000000
if ((nnodes > 1)); then
    [[ -n ${MASTER_ADDR:-} ]] || fail "NNODES=$nnodes needs MASTER_ADDR, the first node's address"
    [[ $MASTER_ADDR =~ ^[[:alnum:].:_-]+$ ]] || fail "MASTER_ADDR=$MASTER_ADDR is not an address"
    if [[ -n $least ]]; then
        [[ -n ${RDZV_ID:-} ]] ||
            fail "NNODES=$NNODES needs RDZV_ID in place of NODE_RANK: nodes that come number themselves"
        whole ELASTIC_WAIT "${ELASTIC_WAIT:=300}" 0 100000000
        ((JOIN_TIMEOUT == 0 || ELASTIC_WAIT < JOIN_TIMEOUT)) ||
            fail "ELASTIC_WAIT=$ELASTIC_WAIT must be less than JOIN_TIMEOUT=$JOIN_TIMEOUT"
        export ELASTIC_NODES=$least:$nnodes
    fi
    if [[ -z ${RDZV_ID:-} ]]; then
        [[ $rank =~ ^(0|[1-9][0-9]{0,8})$ ]] && ((rank < nnodes)) ||
            fail "NNODES=$nnodes needs NODE_RANK of 0 to $((nnodes - 1)) (this is '$rank') or RDZV_ID"
    fi
fi

processes=${NPROC_PER_NODE:-}
if [[ -z $processes && $backend == torchtpu ]]; then
    devices=(/dev/vfio/[0-9]*) # as TorchTPU counts them: two of a TPU7x chip, else one a chip
    [[ -e ${devices[0]} ]] || fail "no TPU here, /dev/vfio has no device: set NPROC_PER_NODE"
    processes=${#devices[@]}
elif [[ -z $processes ]]; then
    # PyTorch's own count, not nvidia-smi's: it heeds CUDA_VISIBLE_DEVICES and a missing driver.
    processes=$("$python" -c 'import torch; print(torch.cuda.device_count())' 2> /dev/null) ||
        fail "$python has no PyTorch: $python -m pip install -r requirements-gpu.txt, or set PYTHON"
    ((processes > 0)) ||
        fail "PyTorch sees no GPU here: set NPROC_PER_NODE to train on the CPU, with gloo"
fi
whole NPROC_PER_NODE "$processes" 1 256

# What the user has set stays as it is.
# torchrun would set 1 thread a process, and leave most cores idle that compute on the host (AdamW
# under --cpu_offload, checkpoints).
threads=$(($(nproc) / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
[[ $OMP_NUM_THREADS =~ ^[1-9][0-9]{0,4}(,[1-9][0-9]{0,4})*$ ]] ||
    fail "OMP_NUM_THREADS=$OMP_NUM_THREADS is not a number of threads (or several, with commas)"
if [[ $backend != torchtpu ]]; then
    # Gathered blocks of changing sizes break fixed segments into pieces that fit nothing: grow them
    # instead. PyTorch 2.9 warns of the older name, PYTORCH_CUDA_ALLOC_CONF.
    if [[ -z ${PYTORCH_CUDA_ALLOC_CONF:-} ]]; then
        export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
    fi
    # NCCL is silent by default: this prints why a connection failed, nothing else. Which network
    # interface nodes share only the user knows: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME.
    export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
fi
export STEP_TIMEOUT_S JOIN_TIMEOUT
export TORCHRUN_PID=$$ # this process becomes torchrun; what it starts ends with it

# The last of two equal options wins: the user's come after these.
words=(--nproc-per-node "$processes" --max-restarts "$MAX_RESTARTS" ${options[@]+"${options[@]}"}
    "$root/run_vit_training.py" --backend cuda "$@")
tpu=()
[[ $backend != torchtpu ]] || tpu=(--torchtpu "$processes")
if ((nnodes == 1)); then
    # By the job's name the program knows that it was started again, and then resumes whatever --resume
    # says. Several nodes agree on one.
    export RUN_JOB_ID=${RUN_JOB_ID:-$(uname -n)-$(date +%Y%m%d-%H%M%S)-$$}
    exec "$python" "$root/launch/torchrun.py" --nodes 1 ${tpu[@]+"${tpu[@]}"} -- "${words[@]}"
fi
who=(--rank "$rank")
[[ -z ${RDZV_ID:-} ]] || who=(--rdzv_id="$RDZV_ID")
[[ -z $least ]] || who+=(--least "$least" --elastic_wait "$ELASTIC_WAIT")
exec "$python" "$root/launch/torchrun.py" --nodes "$nnodes" "${who[@]}" --address="$MASTER_ADDR" \
    --port "$port" --limit "$JOIN_TIMEOUT" ${tpu[@]+"${tpu[@]}"} -- "${words[@]}"
