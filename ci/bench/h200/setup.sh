# Sourced on a machine without a package index: makes the checkout importable as if it were installed.
# Wheels of what the machine lacks are expected in .whl/.
site=$(mktemp -d)
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" .whl/*.whl
mkdir "$site/anycore-0.dist-info"
printf 'Metadata-Version: 2.1\nName: anycore\nVersion: 0\n' > "$site/anycore-0.dist-info/METADATA"
printf '[anycore]\ncpu = anycore_cpu\ncuda = anycore_cuda\n' > "$site/anycore-0.dist-info/entry_points.txt"
export PYTHONPATH="$site:framework:backends:tests" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
