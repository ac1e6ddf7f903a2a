# param_groups and its commands. PyTorch's installation page names the index of its CPU build and of
# the others; without one, pip's default build has 4 GB of CUDA libraries.
#     docker build --build-arg TORCH_INDEX=URL -t param-groups . && docker run --rm param-groups exponents
# Apptainer: apptainer build param-groups.sif docker-daemon://param-groups:latest
FROM python:3.12-slim
ARG TORCH_INDEX
RUN pip install --no-cache-dir torch ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
COPY pyproject.toml LICENSE /build/
COPY param_groups /build/param_groups
RUN pip install --no-cache-dir /build
RUN useradd --create-home user
USER user
WORKDIR /home/user
ENTRYPOINT ["param-groups"]
