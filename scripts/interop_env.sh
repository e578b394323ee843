#!/bin/sh
# Makes .venv-interop: Forebay beside the PyPI packages `dflash` and `speculators`, for tests/interop only.
# Both pin transformers below ours, so they get an environment of their own. Says so and exits 3 where they cannot be
# installed; the tests then skip with that reason.
set -eu
cd "$(dirname "$0")/.."
env=.venv-interop
stamp=$env/ready
[ "${1:-}" = "--force" ] && rm -f "$stamp"
[ -f "$stamp" ] && [ "$stamp" -nt scripts/interop_env.sh ] && exit 0
python="${PYTHON:-python3.11}"
"$python" -m venv "$env"
pip="$env/bin/python -m pip install --quiet --disable-pip-version-check"
fail() {
    echo "interop: cannot install $1 here; tests/interop will be skipped" >&2
    exit 3
}
$pip "torch==2.13.0" "transformers==5.15.0" || fail "torch and transformers"
$pip --no-deps "dflash==0.1.0" "speculators==0.9.0" "hs-connectors==0.9.0" || fail "dflash and speculators"
# What speculators imports, less the engines it never needs for a forward pass.
$pip "datasets==5.0.1" "requests" "tqdm" "accelerate" "pydantic-settings" "loguru" "openai" "typer" "aiohttp" || fail "what speculators imports"
$pip -e . pytest || fail "forebay"
"$env/bin/python" -c "import dflash, speculators" || fail "importable dflash and speculators"
touch "$stamp"
