# An image whose command is `distill`, for one machine. (Ranks over several machines, with Horovod and MPI:
# `python -m distill.distributed.cluster dockerfile`.) From the root of the checkout:
#
#   docker build -t distill .                                # CPU
#   docker build -t distill --build-arg DEVICE=cuda .        # NVIDIA GPUs: torch's wheel brings CUDA, the host the driver
#
#   docker run --rm --init --user "$(id -u):$(id -g)" -v "$PWD:/work" distill
#   docker run --rm --init --user "$(id -u):$(id -g)" -v "$PWD:/work" --gpus all --shm-size 8g distill +recipe=distilbert_gpu
#
# /work is the working folder, so runs/ is beside your files. `-e WANDB_API_KEY` and the like pass secrets on by name.
# --build-arg EXTRAS=s3,onnx adds optional parts (pyproject.toml lists them), --build-arg PACKAGES=g++ a compiler for
# torch.compile, without which long runs compute their losses in plain torch.
ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS build
ARG DEVICE=cpu
ARG EXTRAS=
RUN python -m venv /opt/distill
ENV PATH=/opt/distill/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
COPY constraints.txt ./
# In a layer of its own, as it is the most and changes least. PyPI's torch is that for CUDA.
RUN case "${DEVICE}" in \
      cpu) pip install --constraint constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu torch ;; \
      cuda) pip install --constraint constraints.txt torch nvidia-ml-py ;; \
      *) echo "DEVICE=${DEVICE}: give cpu or cuda" >&2; exit 2 ;; \
    esac
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY distill distill
COPY conf conf
COPY recipes recipes
RUN pip install --constraint constraints.txt ".${EXTRAS:+[${EXTRAS}]}"

FROM python:${PYTHON}
ARG PACKAGES=
RUN if [ -n "${PACKAGES}" ]; then \
      apt-get update && apt-get install --yes --no-install-recommends ${PACKAGES} && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=build /opt/distill /opt/distill
# HOME and USER hold for any --user, who may have no line in /etc/passwd: caches are of the container, or a volume there.
ENV PATH=/opt/distill/bin:$PATH HOME=/home/distill USER=distill NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN useradd --create-home --uid 10001 distill && install --directory --owner distill --mode 1777 /work /home/distill
USER 10001
WORKDIR /work
ENTRYPOINT ["distill"]
