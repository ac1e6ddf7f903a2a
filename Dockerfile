# param_groups and its commands, in the locked environment: every file has its SHA-256.
#     docker build -t param-groups . && docker run --rm param-groups exponents
# --build-arg UV_TORCH_BACKEND=cpu takes torch's CPU build, without 4 GB of CUDA libraries, and checks no hash.
# Apptainer: apptainer build param-groups.sif docker-daemon://param-groups:latest
FROM python:3.12-slim
ARG UV_TORCH_BACKEND
WORKDIR /opt/param-groups
COPY requirements.txt requirements.lock ./
COPY scripts/environment.sh scripts/
RUN bash scripts/environment.sh
COPY pyproject.toml LICENSE ./
COPY param_groups param_groups
RUN .venv/bin/pip install --no-index --no-deps --no-build-isolation .
RUN useradd --create-home user
USER user
WORKDIR /home/user
ENTRYPOINT ["/opt/param-groups/.venv/bin/param-groups"]
