#!/bin/sh
# One short check of a machine with one GPU (under 8 minutes, no network): the GPU tests (parity, one compilation, graph
# equals eager, F15), then speeds of Qwen3-8B shapes with random weights. One JSON object a line on stdout.
#   scripts/gpu_check.sh > gpu.jsonl          PYTHON: the interpreter; FOREBAY_DEVICE=cpu: a dry run with tiny shapes
cd "$(dirname "$0")/.." || exit 2
if [ -z "$PYTHON" ]; then PYTHON=.venv/bin/python; [ -x "$PYTHON" ] || PYTHON=python3; fi
export PYTHONPATH="$PWD/src:$PWD/tests" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
DEVICE="${FOREBAY_DEVICE:-cuda}"
failed=0

timeout 200 "$PYTHON" -m pytest tests/gpu -q -o addopts= -p no:cacheprovider > /tmp/forebay-gpu-tests.$$ 2>&1
code=$?
summary="$(tail -n 1 /tmp/forebay-gpu-tests.$$ | tr -d '"\\')"
[ $code -eq 0 ] || { failed=1; cat /tmp/forebay-gpu-tests.$$ >&2; }
rm -f /tmp/forebay-gpu-tests.$$
printf '{"figure": "tests_gpu", "exit": %d, "summary": "%s"}\n' "$code" "$summary"

timeout 260 "$PYTHON" scripts/gpu_check.py --device "$DEVICE" || { code=$?; failed=1; printf '{"figure": "speeds", "exit": %d}\n' "$code"; }
exit $failed
