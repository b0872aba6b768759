# A small GPT trained under autofuse, twice, and the report:   docker build -t autofuse . && docker run --rm autofuse
# A shell with autofuse in it:                                  docker run --rm -it autofuse bash
FROM python:3.13-slim-bookworm
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home someone \
    && install -d -o someone /home/someone/autofuse
USER someone
WORKDIR /home/someone/autofuse
COPY --chown=someone . .
RUN scripts/setup
ENV PATH=/home/someone/autofuse/.venv/bin:$PATH
CMD ["scripts/demo"]
