# napkin on CPUs.
#
#   docker build -t napkin --build-arg UID="$(id -u)" .
#   docker run --rm -it --init -v "$PWD:/work" napkin demo
FROM python:3.13-slim

# g++ is what torch.compile writes a CPU's code with.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# Files that a run writes into a mounted folder belong to this user.
ARG UID=1000
RUN useradd --create-home --uid "$UID" napkin \
    && install --directory --owner napkin /work

# torch first: this layer is kept while napkin changes. Its local version 2.x+cpu comes before the 2.x with CUDA.
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
COPY constraints.txt /src/
RUN pip install --no-cache-dir --constraint /src/constraints.txt torch
COPY pyproject.toml setup.py README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir --constraint /src/constraints.txt /src

WORKDIR /work
USER ${UID}
# Calibrations and machine code outlive a container if this folder is a volume: -v napkin-cache:/home/napkin/.cache
ENV NAPKIN_CACHE_DIR=/home/napkin/.cache/napkin
RUN mkdir -p "$NAPKIN_CACHE_DIR"
ENTRYPOINT ["napkin"]
CMD ["--help"]
