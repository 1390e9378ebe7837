#!/bin/bash
# The main job on several nodes of a Slurm cluster, one rank per GPU.
#
#   python -m distill.distributed.cluster slurm > slurm.sh
#   sbatch slurm.sh                            from the checkout, which lies where all nodes see it
#   BOOKS=/data/books sbatch slurm.sh seed=1      settings of Distill are handed on
#   RECIPE=distilbert_gutenberg BOOKS=/data/books sbatch slurm.sh    a small trial that needs no internet
#
# Before: any `make` target on a node like those of the job (for BACKEND=horovod `make horovod`). distilbert_paper fetches its
# teacher from the Hugging Face Hub. Where the nodes have no internet, run once on the login node
#   HF_HOME=runs/hub .venv/bin/hf download google-bert/bert-base-uncased --include '*.json' '*.txt' '*.safetensors'
# and submit with HF_HUB_OFFLINE=1 in the environment.
#
# Change: the #SBATCH lines. On nodes without GPUs take out --gpus-per-node and give a rank to each socket, such as
# --ntasks-per-node=2 --ntasks-per-socket=1 --cpus-per-task=16. Do not use --gpus-per-task: a rank picks its GPU itself
# and expects to see all of its node. Where Horovod was built with MPI, srun also needs --mpi=pmix.
# A step has train.sequences_per_step sequences whatever the number of ranks.
#
# The run goes on by itself until it is finished. 180 seconds before the time is over (or up to 60 seconds earlier)
# Slurm sends USR1, by which the run ends with a checkpoint and status 138, and the job puts itself back into the queue:
# take more seconds where a step or a checkpoint lasts longer. It also does so when a rank or a node is lost, though not
# more often than RESTARTS times in a row. After another error, or `scancel`, submit the same line again.
#SBATCH --job-name=distill
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=distill-%j.log
set -euo pipefail

export HF_HOME="${HF_HOME:-$PWD/runs/hub}"

# srun no longer takes over --cpus-per-task by itself. The threads are named because each task is bound to cores of its
# own, which Distill would share out once more. Host and port of rank 0 follow from Slurm's own variables.
status=0
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    .venv/bin/python -m distill +recipe="${RECIPE:-distilbert_paper}" \
    backend="${BACKEND:-ddp}" \
    precision="${PRECISION:-auto}" \
    backend.threads="$SLURM_CPUS_PER_TASK" \
    train.on_usr1=stop \
    ${BOOKS:+"corpus.path=$BOOKS"} \
    data.cache="$PWD/runs/cache" \
    data.local="${TMPDIR:-/tmp}/distill-$USER" \
    "$@" || status=$?

# 138: the time is over. 4: a rank lost another one. 134: it lost another one on GPUs, where NCCL aborts it. 137, 143: it
# was killed, or ended with its node. Slurm may have put the job back itself by then, and then says that it is pending.
lost="distill-$SLURM_JOB_ID.lost"
case "$status" in
    4 | 134 | 137 | 143) echo "$(date) $SLURM_JOB_NODELIST status $status" >>"$lost" ;;
    *) rm -f "$lost" ;;
esac
case "$status" in 4 | 134 | 137 | 138 | 143) ;; *) exit "$status" ;; esac
if [ -e "$lost" ] && [ "$(wc -l <"$lost")" -gt "${RESTARTS:-10}" ]; then exit "$status"; fi
echo "status $status in start $((${SLURM_RESTART_COUNT:-0} + 1)) of job $SLURM_JOB_ID: back into the queue"
scontrol requeue "$SLURM_JOB_ID"
exit "$status"
