#!/bin/sh
# Makes the virtual environment of make learn, or with other requirements that of make engines-torch.
#
#   install.sh VENV [REQUIREMENTS]
#
# On Linux for x86_64 pip's ordinary index has torch with CUDA only, 7 GB with its libraries, and it does not start
# without them. The CPU build is called VERSION+cpu; pip finds it where PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL names a
# folder or an index that has it: pytorch.org, Get Started, Compute Platform: CPU. It is taken where there is no GPU and
# pip finds it. TORCH=cpu takes no other.
set -eu
venv=$1 here=$(dirname "$0")
requirements=${2-$here/requirements.txt}
torch=$(sed -n 's/^torch==//p' "$requirements")
cpu=$(sed -nE 's/^(torch|torchvision)==.*/&+cpu/p' "$requirements")
python3 -m venv "$venv"
pip() { "$venv/bin/python" -m pip install "$@"; }

if [ "${TORCH-}" = cpu ] || [ ! -e /proc/driver/nvidia/version ]; then
	case $(uname -sm) in
	'Linux x86_64')
		# shellcheck disable=SC2086 # one argument for each package
		if ! pip --quiet $cpu 2>/dev/null; then
			[ "${TORCH-}" != cpu ] || {
				echo "pip finds no torch $torch+cpu: PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL must name a folder or" \
					"an index that has it; see pytorch.org, Get Started, CPU" >&2
				exit 1
			}
			echo "pip finds no torch $torch+cpu, so it comes with CUDA, 7 GB; $here/install.sh says how to avoid that"
		fi ;;
	esac
fi
pip --requirement "$requirements"
pip --no-deps --editable "$here/../../pkg/client/python"
touch "$venv/ok"
