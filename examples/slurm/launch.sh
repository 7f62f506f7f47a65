# shellcheck shell=bash
# What the .sbatch files of this folder share: start torchrun on every node of the job, pass the scheduler's signal on to
# the ranks, and put the job back into the queue where they saved and ended with code 75. Sourced; docs/slurm.md explains it.
# The parameters are described in the .sbatch files; what they leave unset is set here.

: "${RUN:?is the folder of the run}" "${CONFIG:?is a YAML file of flags}"
CONTAINER=${CONTAINER:-none}
REQUEUE_AFTER=${REQUEUE_AFTER:-75}
MAX_REQUEUES=${MAX_REQUEUES:-100}
RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
# The batch script runs on the first node. Jobs that share a node get different ports.
HEAD_NODE=${HEAD_NODE:-$(hostname)}
PORT=${PORT:-$((20000 + SLURM_JOB_ID % 10000))}

# scontrol takes the id of an array's last task for the whole array.
JOB=$SLURM_JOB_ID
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
    JOB=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi
ATTEMPT=${SLURM_RESTART_COUNT:-0}
LOG=$RUN/logs/$JOB.$ATTEMPT

say() { printf '[%(%F %T)T] job %s, attempt %s: %s\n' -1 "$JOB" "$ATTEMPT" "$*"; }

# Where torchrun runs: options of srun, or words before the command.
STEP_OPTIONS=()
INSIDE=()
case $CONTAINER in
    none)
        # shellcheck disable=SC1091
        source "${VENV:-.venv}/bin/activate"
        ;;
    pyxis) # enroot, as options of srun
        STEP_OPTIONS=(--container-image="${IMAGE:?}" --container-mounts="${MOUNTS:-$PWD:$PWD}" --container-workdir="$PWD")
        ;;
    apptainer)
        INSIDE=(apptainer exec --nv --bind "${MOUNTS:-$PWD}" --pwd "$PWD" "${IMAGE:?}")
        ;;
    *)
        say "CONTAINER must be none, pyxis or apptainer: CONTAINER=$CONTAINER" >&2
        exit 2
        ;;
esac

# --wait and --kill-on-bad-exit: when one node has ended, the others may still say why; they end by themselves within
# --distributed-timeout-minutes, 10 by default.
# srun does not take --cpus-per-task from the job by itself.
SRUN=(
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}
    --kill-on-bad-exit=0 --wait=900 --output="$LOG.node%n.log" "${STEP_OPTIONS[@]}"
)
# torchrun starts the ranks of its node; the job's id keeps the nodes of one attempt together.
TORCHRUN=(
    torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$RANKS_PER_NODE"
    --rdzv-backend=c10d --rdzv-endpoint="$HEAD_NODE:$PORT" --rdzv-id="$JOB.$ATTEMPT" --signals-to-handle=SIGINT
)
TRAIN=(
    pretrain_rl.py --config "$CONFIG"
    --save "$RUN/checkpoints" --load "$RUN/checkpoints" --tensorboard-dir "$RUN/tensorboard"
)

# Slurm signals every process of a step. The ranks save and end; torchrun has only to wait for them,
# so that it ignores what they handle: an ignored signal stays so in the command that a shell becomes.
launch() {
    # shellcheck disable=SC2016
    exec "${SRUN[@]}" bash -c 'trap "" USR1 TERM; exec "$@"' bash "${INSIDE[@]}" "${TORCHRUN[@]}" "${TRAIN[@]}" "$@"
}

# Codes of the workers of this attempt. torchrun itself ends with 1 and reports theirs.
worker_codes() { sed -nE 's/^ *exitcode *: (-?[0-9]+).*/\1/p' "$LOG".node*.log | sort -nu; }

requeue_or_exit() {
    local code=$1 again
    if ((code == 0)); then
        say "ended with 0"
        exit 0
    fi
    again=$(worker_codes | grep -Fx "$(tr ' ' '\n' <<<"$REQUEUE_AFTER")" | head -n 1)
    if [[ -z $again ]]; then
        say "ended with $code; codes of workers: $(worker_codes | xargs)" >&2
        exit "$code"
    fi
    if ((ATTEMPT >= MAX_REQUEUES)); then
        say "ended with $again, and MAX_REQUEUES=$MAX_REQUEUES: not started again; sbatch goes on from $RUN" >&2
        exit "$again"
    fi
    say "ended with $again; back into the queue"
    scontrol requeue "$JOB"
    exit "$again"
}

mkdir -p "$RUN/logs"
say "$SLURM_JOB_NUM_NODES x $RANKS_PER_NODE ranks on $SLURM_JOB_NODELIST; log in $LOG.node*.log"
launch "$@" &
STEP=$!
trap 'say "USR1 for the ranks: they save and end"; kill -USR1 "$STEP"' USR1
# A trap interrupts `wait`, which has then another code than the step's.
while kill -0 "$STEP" 2>/dev/null; do
    wait "$STEP"
done
wait "$STEP"
requeue_or_exit $?
