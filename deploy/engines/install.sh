#!/bin/sh
# Makes the environments of the real engines for make engines-test: install.sh FOLDER. 8 GB.
#
# They share one torch. On Linux for x86_64 pip's ordinary index has it with CUDA only; without a GPU its libraries are
# not needed, only their names (cuda_stubs.py). SGLang's kernels are published for CUDA only: sglang/ has the two that
# images need on a CPU, sglang-texts/ what it imports for texts. vLLM-Omni knows accelerators only: omni/ is a plug-in
# that has it compute on a CPU. It wants an older vLLM; requirements-omni.txt has what differs.
set -eu
folder=$1 here=$(cd "$(dirname "$0")" && pwd)

lacks= # all of it is said before anything is installed
lack() { lacks="$lacks
  $1"; }
[ "$(uname -sm)" = 'Linux x86_64' ] || lack "Linux on x86_64, which the pinned packages are for; this is $(uname -sm)"
for tool in gcc readelf nm; do
	command -v $tool >/dev/null || lack "$tool: apt-get install gcc binutils"
done
if ! python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
	lack 'Python 3.11 as python3, which the pinned packages are for'
elif ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
	lack 'the modules venv and ensurepip of Python: apt-get install python3-venv'
fi
mkdir -p "$folder"
free=$(df -Pk "$folder" | awk 'END { print int($4 / 1048576) }')
[ "$free" -ge 10 ] || lack "10 GiB of disk for $folder, which has $free"
[ -z "$lacks" ] || {
	echo "make engines-test lacks:$lacks" >&2
	exit 1
}

rm -rf "$folder"
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
python3 -m venv "$folder/vllm"
python3 -m venv "$folder/sglang"
python3 -m venv "$folder/omni"
"$folder/vllm/bin/python" -m pip install --quiet --no-deps --target "$folder/torch" --requirement "$here/requirements-torch.txt"
python3 "$here/cuda_stubs.py" "$folder/torch"
for engine in vllm sglang omni; do
	python=$folder/$engine/bin/python
	[ $engine != omni ] || "$python" -m pip install --quiet --no-deps --requirement "$here/requirements-vllm.txt"
	"$python" -m pip install --quiet --no-deps --requirement "$here/requirements-$engine.txt"
	"$python" -c "import site; open(site.getsitepackages()[0] + '/engines.pth', 'w').write('$folder/torch\n$here/omni\n')"
done
touch "$folder/ok"
