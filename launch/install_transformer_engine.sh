#!/usr/bin/env bash
# Install TransformerEngine for --block te, into an environment with requirements-gpu.txt or
# requirements-gpu-cu128.txt:
#   launch/install_transformer_engine.sh
# A second step, because its PyTorch part is compiled here: 278 MB to download, then 33 C++ files. It
# needs a compiler of C++20 and the toolkit (nvcc, headers) of PyTorch's CUDA.
#
# PYTHON     the environment's Python (default: python3)
# CUDA_HOME  the toolkit (default: /usr/local/cuda-13.0, or /usr/local/cuda-12.8)
# MAX_JOBS   compilers that run at once (default: 8)
set -euo pipefail

fail() {
    echo "install_transformer_engine.sh: error: $*" >&2
    exit 2
}

case ${1:-} in
    '') ;;
    -h | --help) exec sed -n '2,/^set/s/^# \{0,1\}//p' "$0" ;;
    *) fail "unknown argument $1: see --help" ;;
esac
python=${PYTHON:-python3}
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
cuda=$("$python" -c 'import torch; print(torch.version.cuda)' 2> /dev/null) ||
    fail "$python cannot import PyTorch: first run $python -m pip install -r $root/requirements-gpu.txt"
case $cuda in # the newest version that takes the cuDNN of this PyTorch
    13.*) constraints=requirements-gpu.txt package='transformer_engine[pytorch,core_cu13]==2.20.2' toolkit=13.0 ;;
    12.*) constraints=requirements-gpu-cu128.txt package='transformer_engine[pytorch,core_cu12]==2.12.0' toolkit=12.8 ;;
    *) fail "$python has a PyTorch for CUDA $cuda, not 12 or 13: install $root/requirements-gpu.txt" ;;
esac
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda-$toolkit}
[[ -x $CUDA_HOME/bin/nvcc ]] || fail "no $CUDA_HOME/bin/nvcc: install the CUDA $toolkit toolkit, or set CUDA_HOME"
# The headers of cuDNN and NCCL come from PyTorch's wheels.
wheels=$("$python" -c 'import nvidia; print(list(nvidia.__path__)[0])')
export CPATH=$wheels/cudnn/include:$wheels/nccl/include${CPATH:+:$CPATH}
"$python" -m pip install wheel==0.48.0 setuptools==80.9.0 ninja==1.13.2
# Without --no-build-isolation pip would compile against another PyTorch, which it downloads; without
# NVTE_PYTORCH_FORCE_BUILD setup.py first looks on GitHub for a wheel.
export MAX_JOBS=${MAX_JOBS:-8} NVTE_PYTORCH_FORCE_BUILD=TRUE
exec "$python" -m pip install --no-build-isolation -c "$root/$constraints" "$package"
