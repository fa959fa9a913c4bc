#!/bin/sh
# Make .venv with the package, its demo and its tests. `make` runs this when a pyproject.toml has
# changed.
# Another interpreter than python3: PYTHON=/path/to/python make ...
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
torch=2.13.0

fail() {
    echo "setup: $1" >&2
    exit 1
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "Python 3.11 or newer is needed; name one with PYTHON=/path/to/python3.11"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "this Python makes no virtual environments; on Debian: apt-get install python3-venv make"
[ -x .venv/bin/pip ] || "$python" -m venv --clear .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check -qq "$@"; }

# PyPI's torch for Linux is a CUDA build of several GB. Without an NVIDIA GPU take the CPU build,
# which is told apart by its local version: from where pip is set up to find one, else from
# PyTorch's own index.
if [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null && ! pip show torch 2>/dev/null
then
    echo "setup: installing torch $torch for CPU ..."
    pip install "torch==$torch+cpu" 2>/dev/null ||
        pip install "torch==$torch+cpu" --extra-index-url https://download.pytorch.org/whl/cpu ||
        echo "setup: no CPU build of torch $torch for this Python; taking PyPI's, a large one" >&2
fi
echo "setup: installing sharpdraft and what its demo and tests need ..."
# The drafters' package first: it comes from this repository, not from where pip would look.
pip install -e packages/sharpdraft-smollm2
pip install -e ".[dev]"
# The DFlash authors' package, which tests compare with, without the serving stack that it asks for.
pip install --no-deps dflash==0.1.0 ||
    echo "setup: no dflash package; tests against it will be skipped" >&2
