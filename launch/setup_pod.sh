#!/usr/bin/env bash
# Copy this checkout to all workers of a TPU pod and install requirements-tpu.txt there:
#   launch/setup_pod.sh --tpu=NAME [--zone=ZONE] [--project=PROJECT] [--tpu_api=tpu|compute] \
#       [--internal-ip] [--tunnel-through-iap] [--dir=DIR] [--torchtpu]
# DIR is a folder in the home folder of each worker (default: vit-fsdp); Python and the packages are
# installed in DIR/.venv. With --torchtpu, requirements-torchtpu.txt is installed in
# DIR/.venv-torchtpu instead: torch_xla and TorchTPU cannot share an environment. Run the script again
# after a change: it replaces files, deletes none, and keeps installed packages.
set -euo pipefail

fail() {
    echo "setup_pod.sh: error: $*" >&2
    exit 2
}

tpu='' dir=vit-fsdp venv=.venv requirements=requirements-tpu.txt
where=()
while (($#)); do
    case $1 in
        -h | --help) exec sed -n '2,/^set/s/^# \{0,1\}//p' "$0" ;;
        --tpu | --zone | --project | --tpu_api | --dir)
            (($# > 1)) || fail "$1 needs a value"
            set -- "$1=$2" "${@:3}"
            continue
            ;;
        --tpu= | --zone= | --project= | --tpu_api= | --dir=) fail "$1 needs a value" ;;
        --tpu=?*) tpu=${1#*=} ;;
        --dir=?*) dir=${1#*=} ;;
        --zone=?* | --project=?* | --tpu_api=?*) where+=("$1") ;;
        --internal-ip | --tunnel-through-iap) where+=("$1") ;;
        --torchtpu) venv=.venv-torchtpu requirements=requirements-torchtpu.txt ;;
        *) fail "unknown argument $1: see --help" ;;
    esac
    shift
done
[[ -n $tpu ]] || fail "--tpu=NAME is missing"
[[ $dir =~ ^[A-Za-z0-9_][A-Za-z0-9._-]*$ ]] || fail "--dir=$dir must be a plain folder name"
command -v gcloud > /dev/null || fail "gcloud not found on PATH: install it, https://cloud.google.com/sdk/docs"

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
archive=$temporary/$dir.tar.gz
# Program files only, without .venv, datasets and runs; links are replaced by their targets.
files=(run_vit_training.py check_python.py config_fields.py tpu_machines.py requirements-common.txt requirements-tpu.txt requirements-torchtpu.txt README.md features training models data tpu_attention xla_fsdp torch_fsdp gpu_fsdp tools launch recipes)
# Of the user: docs/extending.md.
if [[ -d extensions ]]; then files+=(extensions); fi
tar --exclude=__pycache__ -czhf "$archive" -- "${files[@]}"

python3 -m launch.slices --tpu="$tpu" ${where[@]+"${where[@]}"} "$archive"

# The image has Python 3.10 (Ubuntu 22.04) or 3.12 without venv (24.04): uv installs another one.
# shellcheck disable=SC2016 # expanded on the workers
install='
set -e
mkdir -p "$1"
tar -xzf "$1.tar.gz" -C "$1"
rm "$1.tar.gz"
cd "$1"
if ! test -x "$2/bin/python"; then
    if ! python3.11 -m venv "$2" && ! python3.12 -m venv "$2"; then
        python3 -m pip install --quiet --target .uv uv
        .uv/bin/uv venv --clear --quiet --seed --python 3.11 "$2"
    fi
fi
"$2/bin/python" -m pip install --quiet -r "$3"
echo "installed in $PWD/$2"'
python3 -m launch.xla_dist --tpu="$tpu" ${where[@]+"${where[@]}"} \
    --log_dir "$temporary/logs" -- sh -c "$install" sh "$dir" "$venv" "$requirements"
