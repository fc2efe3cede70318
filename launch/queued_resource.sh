#!/usr/bin/env bash
# Request a TPU slice, wait for it, set it up, and run a command on all its workers:
#   launch/queued_resource.sh --tpu=NAME --type=v5litepod-64 --version=v2-alpha-tpuv5-lite \
#       [--zone=ZONE] [--project=PROJECT] [--internal-ip] [--spot] [--create_flag=FLAG ...] \
#       [--max_preemptions=N] [--delete] [--network_disk=FOLDER ...] [--torchtpu] [--dry_run] \
#       [other flags of launch.xla_dist] -- COMMAND ...
# The queued resource and its slice are both named NAME. An existing one is reused, so run the same
# command again to continue after a stop.
# --create_flag=FLAG: a flag of gcloud's create, as in --create_flag=--service-account=EMAIL.
# --max_preemptions=N: replace the slice up to N times after it was preempted: delete it, request it
#   again, wait, set it up, and run the command, which resumes from its newest checkpoint (default: 0).
# --delete: delete the slice at the end, including the data on its disks, also after a failed gcloud
#   call or Ctrl-C. Without a command, only delete it. This flag and --max_preemptions are refused if
#   the command writes checkpoints to the slice's disks.
# --network_disk=FOLDER: a folder on the hosts that is a network disk or a mounted bucket, so that a
#   --ckpt_dir in it outlives the slice.
# --torchtpu: passed to setup_pod.sh.  --dry_run: print the commands without running them.
# POLL_SECONDS (default: 30): seconds between checks of the slice's state.
# Exit code: that of the command; 1 if no slice could be created; 2 for a usage error.
set -euo pipefail

say() {
    echo "queued_resource.sh: $*"
}
fail() {
    say "error: $*" >&2
    exit 2
}

tpu='' type='' version='' delete='' dry_run='' preemptions=0
place=() request=() network=() setup=() launcher=() disks=()
while (($#)) && [[ $1 != -- ]]; do
    case $1 in
        --tpu | --type | --version | --zone | --project | --max_preemptions | --network_disk)
            (($# > 1)) || fail "$1 needs a value"
            set -- "$1=$2" "${@:3}"
            continue
            ;;
        --tpu= | --type= | --version= | --zone= | --project= | --network_disk=) fail "$1 needs a value" ;;
        -h | --help) exec sed -n '2,/^set/s/^# \{0,1\}//p' "$0" ;;
        --tpu=?*) tpu=${1#*=} ;;
        --type=?*) type=${1#*=} ;;
        --version=?*) version=${1#*=} ;;
        --zone=?* | --project=?*) place+=("$1") ;;
        --max_preemptions=*) preemptions=${1#*=} ;;
        --network_disk=?*) disks+=("${1#*=}") ;;
        --create_flag=--?*) request+=("${1#*=}") ;;
        --spot) request+=(--spot) ;;
        --internal-ip) network+=("$1") ;;
        --delete) delete=yes ;;
        --dry_run) dry_run=yes ;;
        --torchtpu) setup+=("$1") ;;
        *) launcher+=("$1") ;;
    esac
    shift
done
command=("${@:2}")
((${#command[@]})) || [[ -n $delete ]] || fail "no command: pass it after --, or --delete to delete the slice"
[[ -n $tpu ]] || fail "--tpu=NAME is missing"
[[ $tpu != *,* ]] || fail "--tpu=$tpu: this script requests one slice; pass one name"
[[ $preemptions =~ ^[0-9]{1,6}$ ]] || fail "--max_preemptions=$preemptions must be a whole number"
preemptions=$((10#$preemptions)) # 08 is no octal number
((preemptions == 0)) || [[ -n $type && -n $version ]] ||
    fail "--max_preemptions requires --type and --version, to request the slice again"
poll=${POLL_SECONDS:-30}
[[ $poll =~ ^[0-9]{0,6}(\.[0-9]+)?$ && $poll =~ [1-9] ]] ||
    fail "POLL_SECONDS=$poll must be a number of seconds above 0"

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
whole=(--tpu="$tpu" ${place[@]+"${place[@]}"} ${network[@]+"${network[@]}"})
queued=(gcloud compute tpus queued-resources)
named=("$tpu" ${place[@]+"${place[@]}"} --quiet)
create=("${queued[@]}" create "${named[@]}" --node-id="$tpu" --accelerator-type="$type"
    --runtime-version="$version" ${request[@]+"${request[@]}"})
remove=("${queued[@]}" delete "${named[@]}" --force)
prepare=(bash launch/setup_pod.sh "${whole[@]}" ${setup[@]+"${setup[@]}"})
start=(python3 -m launch.xla_dist "${whole[@]}" --workdir vit-fsdp)
train=("${start[@]}" ${launcher[@]+"${launcher[@]}"} -- ${command[@]+"${command[@]}"})
deletes=''
((preemptions == 0)) || deletes=--max_preemptions
[[ -z $delete ]] || deletes=--delete
[[ -z $deletes ]] ||
    lost=$(python3 -m launch.ckpt_dir "$deletes" ${disks[@]+"${disks[@]}"} -- ${command[@]+"${command[@]}"}) ||
    fail "$lost"
# Check the flags of xla_dist now, not after the slice has been created.
python3 -m launch.xla_dist "${whole[@]}" ${launcher[@]+"${launcher[@]}"} --dry_run -- \
    "${command[@]-true}" > /dev/null
if [[ -n $dry_run ]]; then
    show() { printf '%q ' "$@" && echo; }
    if ((${#command[@]})); then
        [[ -z $type || -z $version ]] || show "${create[@]}"
        show "${prepare[@]}"
        shown=() last='' # without the values of --env, which may be secret
        for word in ${launcher[@]+"${launcher[@]}"}; do
            case $last:$word in
                --env:*) shown+=("${word%%=*}") ;;
                *:--env=*=*)
                    name=${word#--env=}
                    shown+=("--env=${name%%=*}")
                    ;;
                *) shown+=("$word") ;;
            esac
            last=$word
        done
        show "${start[@]}" ${shown[@]+"${shown[@]}"} -- "${command[@]}"
        ((preemptions == 0)) || echo "# after a preemption, up to $preemptions times: delete, then all of the above"
    fi
    [[ -z $delete ]] || show "${remove[@]}" --async
    exit 0
fi
command -v gcloud > /dev/null || fail "gcloud not found on PATH: install it, https://cloud.google.com/sdk/docs"

# Set $now to the slice's state: NONE if it does not exist, UNKNOWN (and $reason) if gcloud fails.
look() {
    local describe=("${queued[@]}" describe "${named[@]}" --format='value(state.state)')
    if ! now=$("${describe[@]}" 2> /dev/null) && ! now=$("${describe[@]}" 2>&1); then # for the message
        reason=${now//$'\n'/ } now=UNKNOWN
        [[ $reason != *NOT_FOUND* ]] || now=NONE
    elif [[ ! $now =~ ^[A-Z_]+$ ]]; then
        reason="it printed no state but $(printf %q "$now")" now=UNKNOWN
    fi
}

needs_person() {
    python3 -c 'import sys, launch.slices; sys.exit(not launch.slices.needs_person(sys.argv[1]))' "$1"
}

give_back() {
    trap '' INT TERM HUP # a second Ctrl-C must not leave a slice that incurs costs
    say "deleting $tpu; it incurs costs as long as gcloud compute tpus queued-resources list shows it"
    "${remove[@]}" --async || {
        say "error: $tpu may still exist and incur costs: delete it" >&2
        return 1
    }
}

# 1 if no slice may be replaced any more.
replace() {
    ((preemptions > 0)) || return 1
    preemptions=$((preemptions - 1))
    say "$tpu was preempted: replacing it; $preemptions replacement(s) left"
    "${remove[@]}" || say "deleting $tpu failed; waiting until it is gone" >&2
}

told='' # the state that was last seen
get_slice() {
    local requested=''
    while look; [[ $now != ACTIVE ]]; do
        case $now in
            NONE)
                if [[ -z $requested ]]; then
                    [[ -n $type && -n $version ]] ||
                        fail "no queued resource $tpu yet: pass --type and --version to request one"
                    # Before the request: a failed call may still have created it.
                    [[ -z $delete ]] || trap give_back EXIT
                    requested=yes
                    "${create[@]}"
                    continue
                fi
                ;;
            UNKNOWN) # gcloud may fail occasionally during days of waiting
                if needs_person "$reason"; then
                    fail "gcloud cannot describe $tpu: $reason"
                elif [[ -z $told$requested ]]; then
                    say "gcloud cannot tell whether $tpu exists: $reason" >&2
                    exit 1
                fi
                ;;
            SUSPENDED) ! replace || continue ;;&
            SUSPENDED | FAILED)
                local advice="delete it and try again"
                [[ -z $delete ]] || advice="it is deleted now; try again"
                say "$tpu is $now: $advice" >&2
                exit 1
                ;;
        esac
        [[ $now != UNKNOWN ]] || now="UNKNOWN ($reason)"
        [[ $now == "$told" ]] || say "$tpu is $now, waiting until it is ACTIVE"
        told=$now
        sleep "$poll"
    done
    told=ACTIVE
}

# Run the command in its own process group and forward signals: otherwise it would receive Ctrl-C twice,
# from the terminal and from this trap, and SIGTERM not at all.
stopped='' # the exit code for a signal to this script
run() {
    set -m
    "${train[@]}" &
    local job=$!
    trap 'stopped=130; kill -INT "$job"' INT
    trap 'stopped=143; kill -TERM "$job"' TERM HUP
    code=0
    wait "$job" || code=$?
    while kill -0 "$job" 2> /dev/null; do # a signal ended the wait, not the job
        code=0
        wait "$job" || code=$?
    done
    set +m
}

if ! ((${#command[@]})); then
    give_back
    exit
fi
# A second launcher would start a second program on the slice, and delete it at its end.
lock=${XDG_CACHE_HOME:-$HOME/.cache}/vit_fsdp/queued_resource-$tpu${place[*]+"${place[*]}"}.lock
mkdir -p "${lock%/*}"
exec 9>> "$lock" # the programs that this script starts hold the lock, too
python3 -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2> /dev/null ||
    fail "another queued_resource.sh uses $tpu ($lock): stop that one first"
look
[[ $now == NONE || $now == UNKNOWN || -z $delete ]] || trap give_back EXIT
while true; do
    get_slice
    trap 'stopped=130' INT
    trap 'stopped=143' TERM HUP
    code=0
    "${prepare[@]}" || code=$?
    code=${stopped:-$code}
    ((code)) || run
    trap - INT TERM HUP
    if [[ -n $stopped ]] || ! ((preemptions)); then break; fi
    case $code in 0 | 2 | 3 | 4 | 5) break ;; esac # a restart would not help
    for _ in 1 2 3 4; do # a preemption is not known at once
        look
        [[ $now != SUSPEND* ]] || continue 2
        sleep "$poll"
    done
    break
done
exit "$code"
