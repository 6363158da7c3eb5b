#!/usr/bin/env bash
# What the torch engine has to show on a GPU, in one report:
#
#   deploy/bench/gpu-torch.sh [FOLDER OF THE PROGRAMS] [REPORT]
#
# after `make gpu-programs`. It needs the programs meander and bench, this checkout beside them, and a python3 with
# torch and diffusers (PYTHON names it). It takes no network, and ends within 4 minutes: each line has a limit of its
# own, what matters most comes first, and what no time is left for is said. Without a GPU it runs to its end, too.
#
#   DEVICE=cuda:0   where networks are computed      SMALL=1   tiny models only, to try the script itself
#   LIMIT=235       seconds for everything; 900 with SMALL, which is for machines that have no GPU and few cores
#   FAMILIES=...    the families that are proven, by their names in tiny.py; all, with SMALL sd3
#
# First comes what is right or wrong, all at once; then what is timed, one after the other.
set -uo pipefail
cd "$(dirname "$0")/../.."
programs=$(realpath -m "${1:-build/cuda/bin}") report=${2:-build/gpu-torch.md} device=${DEVICE:-cuda:0}
python=${PYTHON:-python3}
families=${FAMILIES:-sd3 qwen-image flux1 z-image flux2 flux2-klein krea2 wan wan-5b wan-two hunyuan-video ltx}
tests=pkg/client/python/tests/torch_engine small=${SMALL:-} missed=0 patience=1 most=${LIMIT:-235}
[ -z "$small" ] || patience=4 most=${LIMIT:-900} families=${FAMILIES:-sd3}

# Weights of several GB are read from memory where there is room for them.
base=${TMPDIR:-/tmp}
[ "$(df -Pk /dev/shm 2>/dev/null | awk 'END { print int($4 / 1048576) }')" -ge 24 ] 2>/dev/null && base=/dev/shm
store=$(mktemp -d "$base/gpu-torch.XXXXXX")
trap 'for pid in $(jobs -p); do pkill -P "$pid"; done; wait; rm -rf "$store"' EXIT
trap 'exit 143' TERM INT
mkdir -p "$(dirname "$report")" "$store/jobs"
export MEANDER_PYTHON=$python MEANDER_LOG_LEVEL=warn PYTHONPATH=$PWD/pkg/client/python${PYTHONPATH:+:$PYTHONPATH}
export HF_HUB_DISABLE_PROGRESS_BARS=1 store device programs python

say() { printf '%s\n' "$*" | tee -a "$report"; }

# within SECONDS COMMAND...: as long as that, and as there is time for everything.
within() {
	local limit=$(($1 * patience)) left=$((most - SECONDS))
	shift
	[ "$limit" -le "$left" ] || limit=$left
	if [ "$limit" -lt 5 ]; then
		echo "no time was left"
		return 124
	fi
	timeout --kill-after=5 "$limit" "$@"
}

# job KEY SECONDS COMMAND...: in the background, its output and status under that key; answer waits for it.
job() {
	local key=$1
	shift
	(
		within "$@" >"$store/jobs/$key.out" 2>&1 </dev/null
		echo "$? $SECONDS" >"$store/jobs/$key.status"
	) &
	echo $! >"$store/jobs/$key.pid"
}

# succeeded KEY: whether that job did, once it ended.
succeeded() {
	while ! [ -s "$store/jobs/$1.status" ]; do
		kill -0 "$(cat "$store/jobs/$1.pid")" 2>/dev/null || [ -s "$store/jobs/$1.status" ] || return 1
		sleep 0.2
	done
	[ "$(cut -d ' ' -f 1 "$store/jobs/$1.status")" = 0 ]
}

# why KEY: the last thing that a job wrote.
why() {
	[ "$(cut -d ' ' -f 1 "$store/jobs/$1.status" 2>/dev/null)" = 124 ] && printf 'not done in its time; '
	grep -Ev '^ *$|^[|] ' "$store/jobs/$1.out" | tail -n 1 | tr '|' '/' | cut -c 1-300
}

# answer NAME NEEDS KEY PATTERN: a row with the last line of the job's output that has the pattern.
answer() {
	local name=$1 needs=$2 key=$3 pattern=$4 found
	if succeeded "$key" && found=$(grep -E -- "$pattern" "$store/jobs/$key.out") && [ -n "$found" ]; then
		found=$(tail -n 1 <<<"$found" | tr '|' '/')
		say "| $name | $found |"
		return
	fi
	missed=$((missed + 1))
	echo "$key" >>"$store/missed"
	say "| $name | **not measured**: needs $needs; $(why "$key") |"
}

# section NAME NEEDS KEY: the tables that the job wrote, as far as it came.
section() {
	local name=$1 needs=$2 key=$3 done=0
	succeeded "$key" || done=1
	say
	say "## $name"
	awk '/^## / { print "\n#" $0; kind = "" }
		/^[|] |^- / { if (kind != substr($0, 1, 1)) print ""; kind = substr($0, 1, 1); print }' "$store/jobs/$key.out" |
		tee -a "$report"
	if [ $done -ne 0 ]; then
		missed=$((missed + 1))
		echo "$key" >>"$store/missed"
		say
		say "**not measured to its end**: needs $needs; $(why "$key")"
	fi
}

# proven FAMILY DTYPE [--deterministic]: a run of a tiny model and verify of it. In f32 a worker on the CPU verifies it,
# too; deterministic, another run in other batches must have the same digest.
proven() {
	set -eu
	local family=$1 dtype=$2 at="$store/$1-$2${3:-}" size="--height 64 --width 96"
	case $family in ltx) size="$size --frames 9" ;; wan* | hunyuan-video) size="$size --frames 5" ;; esac
	run() {
		local to=$1 batch=$2
		shift 2
		"$programs/meander" run --engine torch --model "$store/tiny/$family" --device "$device" --dtype "$dtype" \
			--threads 1 --seed 5 -n 4 --batch "$batch" --steps 4 --sde-steps 0-2 $size --out - --store "$at-$to" --run run \
			"$@" 'a red cat on a mat' 2>&1
	}
	verify() {
		"$programs/meander" verify --engine torch --model "$store/tiny/$family" --store "$at-one" --threads 1 "$@" run 2>&1
	}
	ratio() { sed -n 's/^max |ratio-1| = //p' <<<"$1" | sed 's/\(\.[0-9][0-9]\)[0-9]*/\1/'; }
	local one two out
	one=$(run one 4 ${3:+"$3"}) || { echo "$one"; exit 1; }
	out=$(verify --device "$device") || { echo "$out"; exit 1; }
	local says="largest difference of a ratio $(ratio "$out")"
	if [ -n "${3:-}" ]; then
		two=$(run two 3 "$3") || { echo "$two"; exit 1; }
		[ "$(ratio "$out")" = 0 ] || { echo "verify is not exact: $(ratio "$out")"; exit 1; }
		[ "$(grep ^digest <<<"$one")" = "$(grep ^digest <<<"$two")" ] ||
			{ echo "batches of 3 have another digest"; exit 1; }
		says="$says, one digest in batches of 4 and 3"
	elif [ "$dtype" = f32 ]; then
		out=$(verify --device cpu --dtype f32 --tolerance 0.01) || { echo "on the CPU: $out"; exit 1; }
		says="$says, computed on the CPU $(ratio "$out")"
	fi
	echo "verified: $says"
}

# halved FOLDER: a run whose rows do not fit into the memory that its worker may take.
halved() {
	set -eu
	export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,per_process_memory_fraction:0.14
	local out
	case $device in cuda*) ;; *) echo "its bound of memory is for CUDA alone"; exit 1 ;; esac
	out=$("$programs/meander" run --engine torch --model "$1" --device "$device" --dtype bf16 --seed 5 -n 32 --batch 32 \
		--steps 2 --sde-steps 0 --out - --store "$store/halved" --run run 'a red cat on a mat' 2>&1) ||
		{ echo "$out"; exit 1; }
	grep 'memory is too small' <<<"$out" | grep -Eo '[0-9]+ rows of .*they are sent by [0-9]+' >"$store/halvings" || {
		echo "all rows fitted: $(grep 'of 1 groups' <<<"$out")"
		exit 1
	}
	echo "$(tr '\n' ';' <"$store/halvings") $(grep 'of 1 groups' <<<"$out")"
}

# compiled FOLDER: a run of a compiled network, which leaves the compiler's results for the next start.
compiled() {
	set -eu
	export TORCHINDUCTOR_COMPILE_THREADS=4 # others are at work
	local out
	out=$("$programs/meander" run --engine torch --compile --model "$1" --device "$device" --dtype bf16 --seed 5 -n 2 \
		--batch 2 --steps 2 --sde-steps 0 --out - --store "$store/compiled" --run run 'a red cat on a mat' 2>&1) ||
		{ echo "$out"; exit 1; }
	grep 'of 1 groups' <<<"$out"
}
export -f proven halved compiled

# once KEY COMMAND...: the command as soon as that job succeeded.
once() {
	until [ -s "$store/jobs/$1.status" ]; do sleep 0.2; done
	[ "$(cut -d ' ' -f 1 "$store/jobs/$1.status")" = 0 ] || { tail -n 1 "$store/jobs/$1.out"; return 1; }
	shift
	"$@"
}
export -f once

: >"$report"
say "# The torch engine on a GPU"
say
say "$(date -u +%FT%TZ), $("$programs/meander" --version 2>&1 | tail -n 1), \`deploy/bench/gpu-torch.sh $*\`"
facts=name,driver_version,memory.total,power.limit
say "GPU and driver: $(nvidia-smi --query-gpu=$facts --format=csv,noheader 2>&1 | tr '\n' ';' | cut -c 1-200)"
say "Python: $("$python" -c '
import platform
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"
names = "torch", "diffusers", "transformers", "tokenizers", "safetensors", "peft", "accelerate", "ftfy", "numpy"
print(platform.python_version(), *(f"{name} {version(name)}" for name in names), sep=", ")' 2>&1 |
	tail -n 1), $(nproc) cores"

all="a GPU, its driver, and $python with torch and diffusers"
pipelines=$tests/tiny.py shapes=deploy/bench/torch_shapes.py
job tiny 60 "$python" "$pipelines" "$store/tiny" $families ${small:+sd3 qwen-image}
if [ -n "$small" ]; then
	sd35=$store/tiny/sd3 few=$store/tiny/sd3 qwen=$store/tiny/qwen-image
	for key in few sd35 qwen; do job $key 60 bash -c 'once tiny echo "$1: a tiny model in its place"' - $key; done
else
	sd35=$store/shapes/sd35 few=$store/shapes/sd35-2 qwen=$store/shapes/qwen-image-8
	job few 80 "$python" "$shapes" "$store/shapes" "$device" sd35=2
	job sd35 80 "$python" "$shapes" "$store/shapes" "$device" sd35
	job qwen 80 "$python" "$shapes" "$store/shapes" "$device" qwen-image=8
fi
job differences 110 bash -c 'once sd35 "$@"' - "$python" deploy/bench/torch_differences.py "$sd35" "$device"
job halved 110 bash -c 'once sd35 halved "$1"' - "$sd35"
job compiled 110 bash -c 'once few compiled "$1"' - "$few"
[ -n "$small" ] ||
	MEANDER_TEST_DEVICE=$device job parity 110 "$python" -m pytest -q -p no:cacheprovider "$tests/test_parity.py" -k \
		'like_the_pipeline or rows_of_a_call or bits_of_a_row or encoded_media or one_frame or expert or rescaled'
ways="f32 bf16 bf16--deterministic f32--deterministic"
keys=
for way in $ways; do
	for family in $families; do
		case $way-$family in f32--deterministic-sd3 | f32--deterministic-wan) ;; f32--deterministic-*) continue ;; esac
		key=$family-$way way_of=${way%--deterministic} flag=
		[ "$way" = "$way_of" ] || flag=--deterministic
		job "$key" 110 bash -c 'once tiny proven "$@"' - "$family" "$way_of" $flag
		keys="$keys $key"
	done
done

say
say "## Right"
say
say "Tiny random models of each family, 4 samples of 4 steps; verify allows ratios 1e-5 in f32 and 0.05 in bf16."
say
say "| what | result |"
say "| --- | --- |"
for key in $keys; do
	way=${key%--deterministic}
	[ "$way" = "$key" ] && how= || how=", deterministic"
	answer "${way%-*} in ${way##*-}$how" "$all" "$key" '^verified'
done
[ -n "$small" ] ||
	answer "networks, media and rows against the pipelines of diffusers, in f32" "$all, and pytest" parity ' passed'
answer "a model of the shapes of SD3.5 medium" "$all" sd35 '^sd35'
answer "the same with 2 of 24 layers" "$all" few '^(sd35|few)'
answer "a model of the shapes of Qwen-Image, with 8 of 60 layers" "$all" qwen '^qwen'
answer "rows that do not fit into the memory" "$all" halved 'sent by'
answer "a run of 2 layers with --compile, nothing compiled before" \
	"$all, and a C compiler" compiled 'of 1 groups'
section "SD3.5 medium: dtypes and rows" "$all" differences
say
say "The velocity of 4 rows at the default size, relative L2: from that in f32, of each row alone from its row of a"
say "call, and of the same call again. GiB: what torch reserved at most. All of it ran at once: no time is a figure."

# bench KEY SECONDS FLAGS...: one section of times.
bench() {
	local key=$1 limit=$2
	shift 2
	job "$key" "$limit" "$programs/bench" torch --python "$python" --device "$device" "$@"
	succeeded "$key"
}
rounds=3 calls=40 dtype=bf16 batches=1,2,4,8
[ -z "$small" ] || rounds=1 calls=5 dtype=f32 batches=1,2
bench overhead 30 --rounds 0 --calls "$calls" --model deploy/models/signs
section "What a call costs" "$python with torch" overhead
bench sd35-times 70 --calls 0 --rounds "$rounds" --batch "$batches" --samples 4 --steps 2 \
	--dtype "$dtype" --model "$sd35"
section "SD3.5 medium" "$all" sd35-times
bench qwen-times 60 --calls 0 --rounds "$rounds" --batch "${batches%,8}" --samples 2 --steps 2 \
	--dtype "$dtype" --model "$qwen"
section "Qwen-Image, 8 of 60 layers" "$all" qwen-times
bench compile-times 60 --calls 0 --rounds "$rounds" --batch "${batches%,8}" --samples 2 --steps 2 --compile \
	--dtype "$dtype" --model "$few"
section "SD3.5 medium with 2 of 24 layers, compiled or not" "$all, and a C compiler" compile-times

if [ -s "$store/missed" ]; then
	say
	say "## What the missed lines wrote"
	while read -r key; do
		[ -s "$store/jobs/$key.out" ] || continue
		say
		say "$key:"
		say '```text'
		tail -n 12 "$store/jobs/$key.out" 2>/dev/null | cut -c 1-400 | tee -a "$report"
		say '```'
	done <"$store/missed"
fi
say
say "$missed lines not measured. Took $SECONDS s."
