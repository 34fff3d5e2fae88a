#!/bin/bash
# Debian's Slurm for the tests marked `slurm`, and Open MPI for that of mpirun; needs root. Nothing is started: the tests
# bring up their own cluster.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge iproute2 util-linux openmpi-bin
