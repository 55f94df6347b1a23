#!/bin/bash
# A run that goes on by itself after its time limit, a preemption or the loss of a node:
#
#   sbatch examples/launch/slurm.sh
#
# 120 s before the limit SLURM sends SIGUSR1. Every rank ends its step, all save one checkpoint, and the job is put back
# into the queue. When it starts again, Lightning finds that checkpoint by itself. A node that dies leaves no time for
# that: SLURM puts the job back (--requeue), and ckpt_path="last" in the script finds the newest whole checkpoint.

#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=04:00:00
#SBATCH --signal=SIGUSR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=train-%j.log

set -euo pipefail

# What a rank waits in, should another one hang (see `hang_timeout`).
export TORCH_FR_BUFFER_SIZE=2000

# One task per GPU; Lightning reads ranks and addresses from SLURM's variables. train.py makes its Trainer with
#   devices=8, num_nodes=2, strategy=MegatronStrategy(tensor_parallel_size=8, pipeline_parallel_size=2),
#   callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=500, save_last=True)]
# and ends with trainer.fit(module, ckpt_path="last").
srun --kill-on-bad-exit=1 python train.py "$@"
