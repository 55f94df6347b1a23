#!/bin/bash
# Two machines with eight devices each (DEVICES=2: with two), by torchrun. Run this on both:
#
#   NODE_RANK=0 MASTER_ADDR=10.0.0.1 examples/launch/torchrun.sh train.py     on the first, whose address that is
#   NODE_RANK=1 MASTER_ADDR=10.0.0.1 examples/launch/torchrun.sh train.py     on the second
#
# train.py makes its Trainer with devices=8, num_nodes=2, strategy=MegatronStrategy(...).

set -euo pipefail

# The network card that reaches the other machine, as `ip addr` names it. Without it gloo and NCCL may choose one that
# does not (a container bridge, a management network), and the launch waits until its timeout.
export GLOO_SOCKET_IFNAME="${INTERFACE:-eth0}"
export NCCL_SOCKET_IFNAME="${INTERFACE:-eth0}"

# From SIGTERM or Ctrl-C on: time to end the step and save a checkpoint, before torchrun kills the ranks (its own: 30 s).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-290}"

exec torchrun --nnodes=2 --nproc-per-node="${DEVICES:-8}" --node-rank="${NODE_RANK:?}" \
    --master-addr="${MASTER_ADDR:?}" --master-port="${MASTER_PORT:-29500}" "$@"
