# anycore on NVIDIA GPUs; build it in the root of the repository:
#   docker build -f docs/deploy/docker/cuda.Dockerfile -t anycore:cuda .
# BASE needs no CUDA: torch brings its libraries, and the host's container toolkit the driver's. It is any image in which
# python3 is Python 3.10 to 3.13 with venv and its header files, and which has apt-get.
ARG BASE=docker.io/library/python:3.12-slim-bookworm@sha256:782412e85d0f0984994c290652577d4018aff08145c85b262bb63dc0c7522254

FROM ${BASE} AS build
ARG TORCH_INDEX=https://pypi.org/simple
ARG EXTRAS=cuda,proxy,otel
ARG PIP_INDEX_URL
WORKDIR /src
COPY ci/constraints.txt ci/
# Of one version by the constraints; of one CUDA by the index.
# hadolint ignore=DL3013
RUN python3 -m venv /opt/anycore \
    && /opt/anycore/bin/pip install --no-cache-dir --no-deps -c ci/constraints.txt --index-url "${TORCH_INDEX}" torch
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY framework framework
COPY backends backends
# ziglang compiles the CPU's kernels, for every level of processor: the image that runs needs no compiler for them.
# hadolint ignore=DL3013
RUN python3 -m venv /tmp/build \
    && /tmp/build/bin/pip install --no-cache-dir -c ci/constraints.txt hatchling ziglang \
    && /tmp/build/bin/hatchling build -t wheel -d /tmp/wheels \
    && /opt/anycore/bin/pip install --no-cache-dir -c ci/constraints.txt "$(ls /tmp/wheels/*.whl)[${EXTRAS}]" \
    && rm -r /tmp/build /tmp/wheels

FROM ${BASE}
# triton compiles the part that launches a kernel on the host, with gcc, once for each kernel.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 anycore \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /cache --shell /usr/sbin/nologin anycore \
    && install -d -o 10001 -g 10001 /cache \
    && install -d /etc/anycore /models
COPY --from=build /opt/anycore /opt/anycore
# Fetched models and compiled kernels are under /cache, the one folder to keep. What is about one run is under /tmp.
ENV PATH=/opt/anycore/bin:$PATH \
    HOME=/cache \
    ANYCORE_CACHE=/cache/anycore \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    XDG_RUNTIME_DIR=/tmp \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /models
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["anycore", "serve", "--host", "0.0.0.0"]
CMD ["demo"]
