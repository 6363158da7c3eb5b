#!/bin/sh
# Says all that this machine lacks for make learn, before anything is built or installed.
#
#   needs.sh VENV [gold -- flags of meander-train]
#
# gold: images are trained, whose samples are read with --gold too, which is tesseract unless the flags say otherwise.
#       ENGINE=torch: the sampler's network is computed by a worker, which has the packages of VENV, too.
# TORCH=cpu: torch comes as its CPU build, which is a sixth of the other.
set -eu
venv=$1
shift
lacks=
lack() { lacks="$lacks
  $1"; }

if [ "${1-}" = gold ]; then
	case ${ENGINE-} in
	'' | torch) ;;
	*) lack "an engine called $ENGINE: ENGINE must be torch, or empty for meander's own Qwen-Image" ;;
	esac
	gold=ocr reward=glyph name=
	for flag; do
		case $name in --gold) gold=$flag ;; --reward) reward=$flag ;; esac
		case $flag in --gold=*) gold=${flag#*=} ;; --reward=*) reward=${flag#*=} ;; esac
		name=$flag
	done
	case ,$gold,$reward, in
	*,ocr,* | *,ocr=*)
		command -v tesseract >/dev/null ||
			lack 'tesseract, the reader that is not rewarded: apt-get install tesseract-ocr (Fedora: dnf install tesseract,
    macOS: brew install tesseract), or LEARN="--gold glyph" to go without' ;;
	esac
fi

if [ ! -e "$venv/ok" ]; then
	if ! command -v python3 >/dev/null; then
		lack 'Python 3.11 to 3.13: apt-get install python3 python3-venv'
	elif ! python3 -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
		have=$(python3 -c 'import platform; print(platform.python_version())')
		lack "Python 3.11 to 3.13, which the pinned packages are for; python3 is $have"
	elif ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
		lack 'the modules venv and ensurepip of Python: apt-get install python3-venv'
	fi
	gib=8 smaller=', or TORCH=cpu with 3 GiB (deploy/learn/install.sh says how)'
	[ "${TORCH-}" != cpu ] || gib=3 smaller=
	mkdir -p "$(dirname "$venv")"
	free=$(df -Pk "$(dirname "$venv")" | awk 'END { print int($4 / 1048576) }')
	[ "$free" -ge "$gib" ] ||
		lack "$gib GiB of disk for $venv, which has $free: free some$smaller"
fi

[ -z "$lacks" ] || {
	echo "make learn lacks:$lacks" >&2
	exit 1
}
