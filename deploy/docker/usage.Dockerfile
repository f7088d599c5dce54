# The usage service. Builds from the repository root; needs no network where wheelhouse/cpu is filled.
FROM python:3.11-slim AS build
ARG PIP_INDEX_URL
COPY LICENSE wheelhous[e]/cpu /build/wheelhouse/
COPY pyproject.toml constraints.txt deploy/docker/install.sh deploy/docker/requirements.py deploy/docker/ca*.crt /build/
RUN sh /build/install.sh dependencies usage
COPY README.md LICENSE /build/
COPY services /build/services
COPY cli /build/cli
COPY protos/gen /build/protos/gen
RUN sh /build/install.sh package

FROM python:3.11-slim
RUN groupadd --gid 10001 millrace && \
    useradd --uid 10001 --gid millrace --no-create-home --home-dir /var/lib/millrace --shell /usr/sbin/nologin millrace && \
    install -d -o millrace -g millrace -m 700 /var/lib/millrace
COPY --from=build /opt/venv /opt/venv
COPY deploy/docker/run-service.sh /usr/local/bin/run-service
COPY deploy/docker/millrace.sh /opt/millrace/bin/millrace
COPY deploy/docker/healthcheck.py /usr/local/lib/millrace/healthcheck.py
ENV PATH=/opt/millrace/bin:/opt/venv/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER millrace
WORKDIR /var/lib/millrace
VOLUME /var/lib/millrace
EXPOSE 7401 7402 9090
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 \
    CMD ["python", "-S", "-E", "/usr/local/lib/millrace/healthcheck.py", "127.0.0.1:9090", "/healthz"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["run-service"]
CMD ["python", "-m", "services.usage"]
