# ResNet50 at scale on NVIDIA's PyTorch image. Not built where this project is developed (no GPU, no such image there).
#   docker build -t resnet50-at-scale .
# docs/containers.md says how to run it, and why with these flags.

# The base must have torch 2.11 or newer: 26.04 and later have (26.05: 2.12.0a0), 26.01 has 2.10.
ARG BASE=nvcr.io/nvidia/pytorch:26.05-py3
FROM ${BASE}

WORKDIR /workspace/resnet50-at-scale
COPY . .
# Only what the image lacks: its torch, torchvision, NCCL and DALI are built for its CUDA and must stay. The image's own
# constraints (PIP_CONSTRAINT) keep pip from replacing them.
RUN pip install --no-cache-dir ".[report]"
# Fails the build where torch is too old or does not fit its torchvision; needs no GPU.
RUN python -c "from tools.doctor.machine import check_installed_torch as check; import sys; f = check(); print(f.message); \
sys.exit(f.level == 'fail')" || (echo "build on an image with torch >= 2.11: --build-arg BASE=IMAGE" && exit 1)

ENTRYPOINT []
CMD ["python", "-m", "tools.doctor"]
