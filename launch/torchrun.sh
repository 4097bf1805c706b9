#!/bin/sh
# A run through torchrun, with the signals and exit codes of `shardbook train`. On each machine the same line:
#
#   NODES=2 NODE_RANK=0 HEAD=node-0 launch/torchrun.sh recipes/llama70b-fsdp.toml run.name=mine run.dir=/shared/runs
#
# NODES      machines (default 1; the next three matter from 2 on)
# NODE_RANK  which of them this is, from 0: a static rendezvous. Unset: torchrun's c10d rendezvous numbers them
# HEAD       the first machine, host or host:port (default port 29500)
# RDZV_ID    a name that the machines of one c10d rendezvous share (default shardbook)
# NPROC      ranks on this machine (default: its GPUs, else 2)
# PYTHON     default: .venv/bin/python here, else python3
#
# SIGTERM or SIGUSR1, to this script or to a rank: all ranks of all machines stop after the same step and save. Exit
# codes: 0 done, 1 failed, 2 wrong recipe or command line, 75 stopped and saved, the same line continues.
set -u

usage() {
    echo "torchrun.sh: $1" >&2
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

whole() {  # name, value, least
    case $2 in '' | *[!0-9]*) usage "$1=$2: must be a whole number" ;; esac
    [ "$2" -ge "$3" ] || usage "$1=$2: must be at least $3"
}

[ $# -gt 0 ] || usage "no recipe"
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
NODES=${NODES:-1}
NPROC=${NPROC:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 2)')}
whole NODES "$NODES" 1
whole NPROC "$NPROC" 1
if [ "$NODES" -eq 1 ]; then
    rendezvous=--standalone
else
    [ -n "${HEAD:-}" ] || usage "NODES=$NODES: needs HEAD, the first machine"
    host=${HEAD%%:*}
    port=29500
    case $HEAD in *:*) port=${HEAD##*:} ;; esac
    whole "HEAD=$HEAD: its port" "$port" 1
    if [ -n "${NODE_RANK:-}" ]; then
        whole NODE_RANK "$NODE_RANK" 0
        [ "$NODE_RANK" -lt "$NODES" ] || usage "NODE_RANK=$NODE_RANK: must be below NODES=$NODES"
        rendezvous="--node-rank=$NODE_RANK --master-addr=$host --master-port=$port"
    else
        rendezvous="--rdzv-backend=c10d --rdzv-endpoint=$host:$port --rdzv-id=${RDZV_ID:-shardbook}"
    fi
fi

# A recipe or a mesh that does not fit so many ranks is said once, in a second: before torchrun starts any.
fits='
import sys
from shardbook.parallel.mesh import resolve_sizes
from shardbook.recipe import RecipeError, find_recipe, find_stage, load_recipe
world, name, *words = sys.argv[1:]
try:
    parallel = load_recipe(find_recipe(name), words).parallel
    resolve_sizes(parallel, find_stage(parallel.stage).axes, int(world))
except RecipeError as error:
    sys.exit(f"shardbook: {error}")'
"$PYTHON" -c "$fits" $((NODES * NPROC)) "$@" || exit 2

# torchrun keeps the store of all ranks, two connections each: the usual 1,024 end at some 500 ranks.
ulimit -n "$(ulimit -Hn)"
# Options by torchrun's own variables: a torch that does not know one of them ignores it. Without the first SIGUSR1
# would end torchrun and orphan its ranks; the second is the seconds in which a step must end and be saved.
export PET_SIGNALS_TO_HANDLE="${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}"
export PET_SHUTDOWN_TIMEOUT="${PET_SHUTDOWN_TIMEOUT:-600}"
SHARDBOOK_EXIT_FILE=$(mktemp) || exit 1
export SHARDBOOK_EXIT_FILE
trap 'rm -f "$SHARDBOOK_EXIT_FILE"' EXIT

# shellcheck disable=SC2086  # several words
"$PYTHON" -m torch.distributed.run --nnodes="$NODES" --nproc-per-node="$NPROC" $rendezvous \
    -m shardbook.train "$@" &
torchrun=$!
asked=
# once: a second signal would break off torchrun's wait for its ranks. Ctrl-C reaches torchrun by itself.
trap '[ -n "$asked" ] || { asked=yes; kill -TERM $torchrun; }' TERM USR1
trap 'asked=yes' INT
while kill -0 $torchrun 2>/dev/null; do  # wait returns when a signal comes, too
    wait $torchrun
    status=$?
done

# torchrun's own status is 0 or 1; each rank that ended by itself has left its code, the first to fail first.
result=0
ended=0
while read -r code; do
    ended=$((ended + 1))
    case $code:$result in
        0:*) ;;
        75:0) result=75 ;;
        75:*) ;;
        *:0 | *:75) result=$code ;;
    esac
done <"$SHARDBOOK_EXIT_FILE"
if [ "$status" -ne 0 ] && [ "$ended" -lt "$NPROC" ]; then
    if [ -n "$asked" ] && [ "$ended" -eq 0 ]; then
        echo "torchrun.sh: stopped, and nothing was saved; run the same command again" >&2
        exit 75
    fi
    case $result in 0 | 75) result=1 ;; esac
fi
exit "$result"
