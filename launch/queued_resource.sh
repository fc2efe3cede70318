#!/usr/bin/env bash
# Ask for a TPU slice, wait for it, set it up, and run a command on all its workers:
#   launch/queued_resource.sh --tpu=NAME --type=v5litepod-64 --version=v2-alpha-tpuv5-lite \
#       [--zone=ZONE] [--project=PROJECT] [--internal-ip] [--spot] [--delete] [--torchtpu] \
#       [other flags of launch.xla_dist] -- COMMAND ...
# The queued resource and its slice are both called NAME. One that is there already is used: run
# the same command again after a stop. --delete gives the slice back at the end, however it came,
# with all that is on its disks, also after a call of gcloud that failed, or Ctrl-C. --torchtpu: what
# setup_pod.sh is to install. POLL_SECONDS (default: 30): how often to ask whether it is up.
# Exit code: the command's; 1 if there is no slice to be had; 2 for a mistake.
set -euo pipefail

fail() {
    echo "queued_resource.sh: error: $*" >&2
    exit 2
}

tpu='' type='' version='' delete=''
place=() request=() network=() setup=() launcher=()
while (($#)) && [[ $1 != -- ]]; do
    case $1 in
        --tpu | --type | --version | --zone | --project)
            (($# > 1)) || fail "$1 needs a value"
            set -- "$1=$2" "${@:3}"
            continue
            ;;
        --tpu= | --type= | --version= | --zone= | --project=) fail "$1 needs a value" ;;
        -h | --help | --dry_run) fail "$1 is not for this script: see its head" ;;
        --tpu=?*) tpu=${1#*=} ;;
        --type=?*) type=${1#*=} ;;
        --version=?*) version=${1#*=} ;;
        --zone=?* | --project=?*) place+=("$1") ;;
        --spot) request+=(--spot) ;;
        --internal-ip) network+=("$1") ;;
        --delete) delete=yes ;;
        --torchtpu) setup+=("$1") ;;
        *) launcher+=("$1") ;;
    esac
    shift
done
(($# > 1)) || fail "no command: give it after --"
[[ -n $tpu ]] || fail "--tpu=NAME is missing"
[[ $tpu != *,* ]] || fail "--tpu=$tpu: this script requests one slice, give one name"
command -v gcloud > /dev/null || fail "no gcloud on PATH: install it, https://cloud.google.com/sdk/docs"
poll=${POLL_SECONDS:-30}
[[ $poll =~ ^[0-9]{0,6}(\.[0-9]+)?$ && $poll =~ [1-9] ]] ||
    fail "POLL_SECONDS=$poll is not a number of seconds above 0"

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
whole=(--tpu="$tpu" ${place[@]+"${place[@]}"} ${network[@]+"${network[@]}"})
# A mistake in xla_dist's flags must show now, not when the slice has come.
python3 -m launch.xla_dist "${whole[@]}" ${launcher[@]+"${launcher[@]}"} --dry_run "$@" > /dev/null

queued() { # queued VERB ARGUMENTS
    gcloud compute tpus queued-resources "$1" "$tpu" ${place[@]+"${place[@]}"} --quiet "${@:2}"
}
state() {
    queued describe --format='value(state.state)'
}

give_back() {
    trap '' INT TERM HUP # Ctrl-C once more is not to leave a slice that costs
    echo "queued_resource.sh: deleting $tpu"
    queued delete --force --async ||
        echo "queued_resource.sh: error: $tpu may still be there, and cost: see to it" >&2
}
give_back_at_the_end() {
    [[ -z $delete ]] || trap give_back EXIT
}

if now=$(state 2> /dev/null); then
    give_back_at_the_end
else
    said=$(state 2>&1) || true # once more, for the reason: one that is there is not asked for again
    [[ $said == *NOT_FOUND* ]] || {
        echo "queued_resource.sh: gcloud cannot tell whether $tpu is there: $said" >&2
        exit 1
    }
    [[ -n $type && -n $version ]] ||
        fail "no queued resource $tpu yet: to ask for one give --type and --version"
    give_back_at_the_end # before it is asked for: a call that fails may have been heard
    queued create --node-id="$tpu" --accelerator-type="$type" --runtime-version="$version" \
        ${request[@]+"${request[@]}"}
    now=$(state) || now=REQUESTED
fi

told=''
while [[ $now != ACTIVE ]]; do
    case $now in
        FAILED | SUSPENDED | SUSPENDING | DELETING)
            echo "queued_resource.sh: $tpu is $now: delete it, and ask again" >&2
            exit 1
            ;;
    esac
    [[ $now == "$told" ]] || echo "queued_resource.sh: $tpu is $now, waiting until it is ACTIVE"
    told=$now
    sleep "$poll"
    now=$(state) || now=$told # gcloud may fail once in days of waiting
done

bash launch/setup_pod.sh "${whole[@]}" ${setup[@]+"${setup[@]}"}

# In a process group of its own, and told of signals here: Ctrl-C would otherwise come to it twice,
# from the terminal and from this trap, and SIGTERM not at all.
set -m
python3 -m launch.xla_dist "${whole[@]}" --workdir vit-fsdp ${launcher[@]+"${launcher[@]}"} "$@" &
job=$!
trap 'kill -INT "$job"' INT
trap 'kill -TERM "$job"' TERM HUP
code=0
wait "$job" || code=$?
while kill -0 "$job" 2> /dev/null; do # a signal ended the wait, not the job
    code=0
    wait "$job" || code=$?
done
exit "$code"
