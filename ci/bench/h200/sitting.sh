# sitting.py on a machine without a package index. PEER is the folder that vLLM's packages were unpacked in.
. ci/bench/h200/setup.sh
export PYTHONPATH="$PYTHONPATH:${PEER:?the folder that vLLM was unpacked in}" VLLM_USE_FLASHINFER_SAMPLER=0
python3 ci/bench/h200/sitting.py "$@"
