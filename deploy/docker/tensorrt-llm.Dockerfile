# Build and inference workers of kind tensorrt_llm:
#   docker build -f deploy/docker/tensorrt-llm.Dockerfile --target build_worker -t enginemesh-build .
#   docker build -f deploy/docker/tensorrt-llm.Dockerfile --target infer_worker -t enginemesh-infer .
#
# The image's entrypoint sets LD_LIBRARY_PATH and stays: only CMD is set here. What it brings is not touched:
# pip leaves what satisfies a requirement as it is, the constraints forbid the rest, and keep_image.py fails
# the build if a package that the library rests on has changed all the same.
FROM nvcr.io/nvidia/tensorrt-llm/release:1.2.1 AS base
WORKDIR /opt/enginemesh
COPY deploy/docker/tensorrt-llm.constraints.txt deploy/docker/keep_image.py deploy/docker/
RUN python3 deploy/docker/keep_image.py note /tmp/image.json
COPY pyproject.toml README.md LICENSE ./
COPY mesh mesh
COPY gateway gateway
COPY build_worker build_worker
COPY infer_worker infer_worker
COPY cli cli
COPY enginemesh enginemesh
RUN python3 -m pip install --no-cache-dir -c deploy/docker/tensorrt-llm.constraints.txt . \
    && python3 deploy/docker/keep_image.py compare /tmp/image.json
ENV ENGINEMESH_KINDS=tensorrt_llm \
    ENGINEMESH_DATA_DIR=/var/lib/enginemesh
VOLUME /var/lib/enginemesh

# ModelOpt and trtllm-build are the image's own.
FROM base AS build_worker
CMD ["python3", "-m", "build_worker.main"]

# One GPU needs no process of MPI's own. ENGINEMESH_MODEL says what is served.
FROM base AS infer_worker
CMD ["python3", "-m", "infer_worker.main"]
