#!/usr/bin/env bash
# Request a TPU slice, wait for it, set it up, and run a command on all its workers:
#   launch/queued_resource.sh --tpu=NAME --type=v5litepod-64 --version=v2-alpha-tpuv5-lite \
#       [--zone=ZONE] [--project=PROJECT] [--internal-ip] [--spot] [--delete] [--torchtpu] \
#       [other flags of launch.xla_dist] -- COMMAND ...
# The queued resource and its slice are both named NAME. An existing one is reused, so run the same
# command again to continue after a stop. --delete deletes the slice at the end, including the data on
# its disks, also after a failed gcloud call or Ctrl-C. --torchtpu is passed to setup_pod.sh.
# POLL_SECONDS (default: 30): seconds between checks whether the slice is ready.
# Exit code: that of the command; 1 if no slice could be created; 2 for a usage error.
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
        -h | --help) exec sed -n '2,/^set/s/^# \{0,1\}//p' "$0" ;;
        --dry_run) fail "$1 is not supported by this script: see --help" ;;
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
(($# > 1)) || fail "no command: pass it after --"
[[ -n $tpu ]] || fail "--tpu=NAME is missing"
[[ $tpu != *,* ]] || fail "--tpu=$tpu: this script requests one slice; pass one name"
command -v gcloud > /dev/null || fail "gcloud not found on PATH: install it, https://cloud.google.com/sdk/docs"
poll=${POLL_SECONDS:-30}
[[ $poll =~ ^[0-9]{0,6}(\.[0-9]+)?$ && $poll =~ [1-9] ]] ||
    fail "POLL_SECONDS=$poll must be a number of seconds above 0"

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
whole=(--tpu="$tpu" ${place[@]+"${place[@]}"} ${network[@]+"${network[@]}"})
# Check the flags of xla_dist now, not after the slice has been created.
python3 -m launch.xla_dist "${whole[@]}" ${launcher[@]+"${launcher[@]}"} --dry_run "$@" > /dev/null

queued() { # queued VERB ARGUMENTS
    gcloud compute tpus queued-resources "$1" "$tpu" ${place[@]+"${place[@]}"} --quiet "${@:2}"
}
state() {
    queued describe --format='value(state.state)'
}

give_back() {
    trap '' INT TERM HUP # a second Ctrl-C must not leave a slice that incurs costs
    echo "queued_resource.sh: deleting $tpu"
    queued delete --force --async ||
        echo "queued_resource.sh: error: $tpu may still exist and incur costs: delete it" >&2
}
give_back_at_the_end() {
    [[ -z $delete ]] || trap give_back EXIT
}

if now=$(state 2> /dev/null); then
    give_back_at_the_end
else
    said=$(state 2>&1) || true # again, for the error message: only NOT_FOUND allows a new request
    [[ $said == *NOT_FOUND* ]] || {
        echo "queued_resource.sh: gcloud cannot tell whether $tpu exists: $said" >&2
        exit 1
    }
    [[ -n $type && -n $version ]] ||
        fail "no queued resource $tpu yet: pass --type and --version to request one"
    give_back_at_the_end # before the request: a failed call may still have created it
    queued create --node-id="$tpu" --accelerator-type="$type" --runtime-version="$version" \
        ${request[@]+"${request[@]}"}
    now=$(state) || now=REQUESTED
fi

told=''
while [[ $now != ACTIVE ]]; do
    case $now in
        FAILED | SUSPENDED | SUSPENDING | DELETING)
            echo "queued_resource.sh: $tpu is $now: delete it and try again" >&2
            exit 1
            ;;
    esac
    [[ $now == "$told" ]] || echo "queued_resource.sh: $tpu is $now, waiting until it is ACTIVE"
    told=$now
    sleep "$poll"
    now=$(state) || now=$told # gcloud may fail occasionally during days of waiting
done

bash launch/setup_pod.sh "${whole[@]}" ${setup[@]+"${setup[@]}"}

# Run it in its own process group and forward signals: otherwise it would receive Ctrl-C twice, from
# the terminal and from this trap, and SIGTERM not at all.
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
