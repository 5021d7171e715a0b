#!/bin/bash
# usage: install.sh VENV
# Installs the real SGLang 0.5.23 server for a CPU-only x86-64 machine (Python 3.11) into VENV.
# Safe to run again: a stamp, written last, names this script's content; any other venv is rebuilt.
set -euo pipefail
venv=${1:?usage: install.sh VENV}
stamp=$venv/.hybridflow-sglang
wanted=$(sha256sum "$0" | cut -d' ' -f1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  echo "SGLang is installed in $venv"
  exit 0
fi
case $(basename "$venv") in
  .venv* | venv*) ;;
  *) echo "VENV must be named .venv* or venv*, since a half-made one is removed: $venv" >&2; exit 2 ;;
esac
rm -rf -- "$venv"
"${PYTHON:-python3.11}" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)

"${pip[@]}" torch==2.13.0
# What `import sglang` and its server import for a text model without grammars.
"${pip[@]}" \
  transformers==5.19.0 tokenizers==0.23.2 numpy==2.4.6 fastapi==0.165.0 uvicorn==0.54.0 \
  uvloop==0.23.0 orjson==3.13.0 pyzmq==27.3.0 msgspec==0.23.0 pydantic==2.14.4 \
  requests==2.34.2 aiohttp==3.14.5 python-multipart==0.0.34 prometheus-client==0.26.0 \
  psutil==7.2.2 setproctitle==1.3.8 pybase64==1.5.1 partial_json_parser==0.2.1.1.post7 \
  ipython==9.18.1 traitlets==5.16.1 dill==0.4.1 einops==0.8.2 sentencepiece==0.2.3 \
  loguru==0.7.3 gguf==0.19.0 openai==2.8.0 jsonschema==4.26.0 soundfile==0.13.1 \
  pillow==13.0.0 apache-tvm-ffi==0.1.11
# --no-deps: SGLang pins another torch and CUDA-only packages that the CPU path never imports;
# torchvision, triton and xgrammar would pull other builds of torch. Last, so that pip does not
# report what is left out on purpose.
"${pip[@]}" --no-deps \
  sglang==0.5.23 torchvision==0.28.0 triton==3.7.0 xgrammar==0.2.7 compressed-tensors==0.18.0

here=$(cd "$(dirname "$0")" && pwd)
PYTHONPATH=$here CUDA_VISIBLE_DEVICES='' "$venv/bin/python" -W ignore \
  -c 'import sglang.srt.entrypoints.http_server'
echo "$wanted" > "$stamp"
echo "SGLang is installed in $venv"
