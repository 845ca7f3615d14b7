# anycore on Ascend NPUs; build it in the root of the repository, with the digest of the base that you want:
#   docker build -f docs/deploy/docker/ascend.Dockerfile -t anycore:ascend \
#     --build-arg BASE=quay.io/ascend/cann:8.5.0-910b-ubuntu22.04-py3.11@sha256:... .
# BASE holds CANN and Python 3.10 or 3.11; torch, torch_npu and CANN are parts of one release: see docs/ascend.md.
ARG BASE

FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH=2.9.0
ARG TORCH_NPU=2.9.0
ARG EXTRAS=ascend,proxy,otel
ARG PIP_INDEX_URL
WORKDIR /src
COPY ci/constraints.txt ci/
# CANN compiles operators with Python packages of the base, so the environment sees those, too.
RUN python3 -m venv --system-site-packages /opt/anycore \
    && grep -v '^torch==' ci/constraints.txt > ci/others.txt \
    && /opt/anycore/bin/pip install --no-cache-dir --no-deps --index-url "${TORCH_INDEX}" "torch==${TORCH}"
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY framework framework
COPY backends backends
# ziglang compiles the CPU's kernels, for every level of processor: the image that runs needs no compiler for them.
# hadolint ignore=DL3013
RUN python3 -m venv /tmp/build \
    && /tmp/build/bin/pip install --no-cache-dir -c ci/constraints.txt hatchling ziglang \
    && /tmp/build/bin/hatchling build -t wheel -d /tmp/wheels \
    && /opt/anycore/bin/pip install --no-cache-dir -c ci/others.txt "torch==${TORCH}" "torch-npu==${TORCH_NPU}" \
        "$(ls /tmp/wheels/*.whl)[${EXTRAS}]" \
    && rm -r /tmp/build /tmp/wheels

FROM ${BASE}
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
    XDG_RUNTIME_DIR=/tmp
USER 10001:10001
WORKDIR /models
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# CANN's environment first; then the server takes the shell's place, so that it gets the signals.
ENTRYPOINT ["/bin/bash", "-c", "source /usr/local/Ascend/ascend-toolkit/set_env.sh && exec anycore serve --host 0.0.0.0 \"$@\"", "anycore"]
CMD ["demo"]
