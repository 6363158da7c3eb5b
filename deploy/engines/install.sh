#!/bin/sh
# Makes the environments of the real engines for make engines-test: install.sh FOLDER. 6 GB.
#
# vLLM and SGLang share one torch. On Linux for x86_64 pip's ordinary index has it with CUDA only; without a GPU its
# libraries are not needed, only their names (cuda_stubs.py). SGLang's kernels are published for CUDA only: sglang/ has
# the two that images need on a CPU, sglang-texts/ what it imports for texts.
set -eu
folder=$1 here=$(cd "$(dirname "$0")" && pwd)
rm -rf "$folder"
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
python3 -m venv "$folder/vllm"
python3 -m venv "$folder/sglang"
"$folder/vllm/bin/python" -m pip install --quiet --no-deps --target "$folder/torch" --requirement "$here/requirements-torch.txt"
python3 "$here/cuda_stubs.py" "$folder/torch"
for engine in vllm sglang; do
	python=$folder/$engine/bin/python
	"$python" -m pip install --quiet --no-deps --requirement "$here/requirements-$engine.txt"
	"$python" -c "import site; open(site.getsitepackages()[0] + '/torch.pth', 'w').write('$folder/torch\n')"
done
touch "$folder/ok"
