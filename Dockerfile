# kvlm for CPUs:  docker build --build-arg COMMIT="$(git rev-parse --short=12 HEAD)" -t kvlm .
# docs/install.md, "Container", has the commands that run it.
FROM debian:12-slim AS build
COPY tools/setup.sh /kvlm/tools/setup.sh
RUN apt-get update && /kvlm/tools/setup.sh --video --images --deb
COPY . /kvlm
WORKDIR /kvlm
ARG COMMIT=unknown
ENV KVLM_COMMIT=$COMMIT
RUN cmake --preset release-programs && cmake --build --preset release-programs
RUN cpack --preset release-programs

FROM debian:12-slim
RUN --mount=type=bind,from=build,source=/kvlm/build/release-programs,target=/mnt \
    apt-get update && apt-get install -y --no-install-recommends /mnt/kvlm_*.deb && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home kvlm && mkdir /data /models && chown kvlm /data /models
ENV HF_HOME=/models
USER kvlm
WORKDIR /data
CMD ["vlm-run", "--help"]
