# param_groups and its commands, CPU only; for another build of torch change the index (README).
#     docker build -t param-groups . && docker run --rm param-groups exponents
# Apptainer: apptainer build param-groups.sif docker-daemon://param-groups:latest
FROM python:3.12-slim
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu
COPY pyproject.toml LICENSE /build/
COPY param_groups /build/param_groups
RUN pip install --no-cache-dir /build
ENTRYPOINT ["param-groups"]
