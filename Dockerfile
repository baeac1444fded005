# Flywheel's daemon, server and page in one image: `docker build -t flywheel .`
# EXTRA=gpu has vLLM, Ray and TRL for a GPU. EXTRA=base reads, judges and shows the page, without torch.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
ARG EXTRA=gpu
WORKDIR /src
RUN python -m venv /opt/flywheel/.venv
ENV PATH=/opt/flywheel/.venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements/ requirements/
RUN pip install -r "requirements/$EXTRA.txt"
COPY . .
RUN pip install .

FROM python:${PYTHON}-slim-bookworm
ARG EXTRA=gpu
# A compiler, for the kernels that Triton and torch compile at run time.
# hadolint ignore=DL3008
RUN if [ "$EXTRA" != base ]; then \
      apt-get update && apt-get install -y --no-install-recommends gcc g++ libc6-dev \
      && rm -rf /var/lib/apt/lists/*; \
    fi \
    && useradd --system --uid 10001 --home-dir /var/lib/flywheel flywheel \
    && install -d -o flywheel -m 0700 /var/lib/flywheel /var/cache/flywheel
COPY --from=build /opt/flywheel/.venv /opt/flywheel/.venv
ENV PATH=/opt/flywheel/.venv/bin:$PATH \
    FLYWHEEL_CONFIG=/etc/flywheel/flywheel.yaml FLYWHEEL_HOME=/var/lib/flywheel \
    XDG_CACHE_HOME=/var/cache/flywheel XDG_CONFIG_HOME=/var/cache/flywheel/config TRITON_HOME=/var/cache/flywheel
USER 10001
WORKDIR /var/lib/flywheel
VOLUME ["/var/lib/flywheel", "/var/cache/flywheel"]
# SIGTERM waits for judge calls in flight and stops a round's worker.
STOPSIGNAL SIGTERM
ENTRYPOINT ["flywheel"]
CMD ["run"]
