#!/bin/bash
# Install Debian's Slurm for the tests marked `slurm`, rsync for the test of SUBMIT_STAGE, and Open MPI for the test of
# mpirun. Needs root. Starts no service: the tests start their own cluster.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge iproute2 util-linux rsync openmpi-bin
