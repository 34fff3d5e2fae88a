# ResNet50 at scale on NVIDIA's PyTorch image. Never built by this project's tests.
#   docker build -t resnet50-at-scale .
# docs/containers.md explains how to run it.

# The base must have torch 2.11 or newer: 26.04 and later do (26.05: 2.12.0a0), 26.01 has 2.10.
ARG BASE=nvcr.io/nvidia/pytorch:26.05-py3
FROM ${BASE}

WORKDIR /workspace/resnet50-at-scale
COPY . .
# Installs only missing packages: the image's constraints (PIP_CONSTRAINT) keep pip from replacing its torch, torchvision,
# NCCL and DALI, which are built for its CUDA.
RUN pip install --no-cache-dir ".[report]"
# Fails the build if torch is too old; needs no GPU.
RUN python -c "from tools.doctor.machine import check_installed_torch as check; import sys; f = check(); print(f.message); \
sys.exit(f.level == 'fail')" || (echo "build on an image with torch >= 2.11: --build-arg BASE=IMAGE" && exit 1)

ENTRYPOINT []
CMD ["python", "-m", "tools.doctor"]
