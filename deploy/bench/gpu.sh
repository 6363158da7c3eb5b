#!/usr/bin/env bash
# Everything that a GPU has to show, in one report: make gpu-bench, or on a machine without Go
#
#   deploy/bench/gpu.sh [FOLDER OF THE PROGRAMS] [REPORT]
#
# after `make gpu-programs`, which builds them without a GPU. It needs those programs, deploy/ beside them, and for the
# columns of the other engine a python3 with torch (PYTHON names it). It takes no network, and ends within 8 minutes: each
# line has a limit of its own. Without a GPU it runs to its end too, and says for each line what that needs.
#
#   DEVICE=cuda:0   what is measured      SMALL=1   tiny shapes, to try the script itself
set -uo pipefail
cd "$(dirname "$0")/../.."
programs=${1:-build/cuda/bin} report=${2:-build/gpu.md} device=${DEVICE:-cuda:0} python=${PYTHON:-python3}
store=$(mktemp -d)
trap 'rm -rf "$store"' EXIT
mkdir -p "$(dirname "$report")"
export MEANDER_MODELS=$PWD/deploy/models MEANDER_LOG_LEVEL=error
missed=0 samples=4
[ -n "${SMALL:-}" ] && samples=1

# The tests find the shipped model three folders up.
tests() { (cd deploy/models/signs && MEANDER_GPU=1 exec "$tests" -test.v "$@"); }
export -f tests
tests=$(realpath -m "$programs")/cuda.test
export tests

say() { printf '%s\n' "$*" | tee -a "$report"; }

# line NAME NEEDS SECONDS PATTERN COMMAND...: a row with the last line of the output that has the pattern.
line() {
	local name=$1 needs=$2 limit=$3 pattern=$4 out status
	shift 4
	out=$(timeout --kill-after=5 "$limit" "$@" 2>&1)
	status=$?
	printf '== %s: exit status %s\n%s\n' "$name" "$status" "$out" >>"${report%.md}.log"
	local found
	found=$(grep -E -- "$pattern" <<<"$out" | tail -n 1 | tr '|' '/' | sed -E 's/^ *([a-z_]+_test\.go:[0-9]+: )?//')
	if [ $status -eq 0 ] && [ -n "$found" ]; then
		say "| $name | $found |"
		return
	fi
	missed=$((missed + 1))
	local why
	why=$(grep -Ev "^ *($|---|===|FAIL|PASS)" <<<"$out" | tail -n 1 | tr '|' '/' | cut -c 1-300)
	[ $status -eq 124 ] && why="not done after $limit s"
	say "| $name | **not measured**: needs $needs; ${why:-no output} |"
}

: >"$report"
: >"${report%.md}.log" # the whole output of each line
say "# GPU report"
say
say "$(date -u +%FT%TZ), $("$programs/meander" --version 2>&1 | tail -n 1), \`deploy/bench/gpu.sh $*\`"
say "GPU and driver: $(nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv,noheader 2>&1 | tr '\n' ';' | cut -c 1-200)"
say
say "## Right"
say
say "| what | result |"
say "| --- | --- |"
gpu="a GPU of compute capability 8.0 or newer, and its driver"
line "conformance of all operations" "$gpu" 60 '^--- PASS: TestGPU_Conformance ' bash -c 'tests "$@"' - -test.run '^TestGPU_Conformance$'
line "conformance in bf16, own kernels" "$gpu" 60 '^--- PASS: TestGPU_ConformanceInBF16 ' bash -c 'tests "$@"' - -test.run '^TestGPU_ConformanceInBF16$'
line "conformance in bf16, cuBLASLt" "$gpu, and cuBLASLt" 60 '^--- PASS: TestGPU_ProductsOfCuBLASLt ' bash -c 'tests "$@"' - -test.run '^TestGPU_ProductsOfCuBLASLt$'
line "products and attention of Qwen-Image at 1024 pixels against the CPU" "$gpu" 60 'relative L2' bash -c 'tests "$@"' - -test.run '^TestGPU_LargeShapes$'
line "velocities of two of its layers against the CPU" "$gpu" 60 'relative L2' bash -c 'tests "$@"' - -test.run '^TestGPU_QwenImageLayers$'
line "velocities of signs in f32 against the CPU" "$gpu" 30 'relative L2' bash -c 'tests "$@"' - -test.run '^TestGPU_Signs$/^F32$'
line "velocities of signs in bf16 against f32" "$gpu" 30 'relative L2' bash -c 'tests "$@"' - -test.run '^TestGPU_Signs$/^BF16$'
for factors in F32 BF16; do
	line "pixels of a model with heads of 128, a LoRA pushed on the way, in $factors against the CPU" "$gpu" 30 'relative L2' bash -c 'tests "$@"' - -test.run "^TestGPU_PaintsAndTakesALoRA\$/^$factors\$"
done
paint=(run --seed 5 --group-size "$samples" --out "$store/out")
[ -n "${SMALL:-}" ] && paint=(run --seed 5 --group-size "$samples" --steps 2 --out "$store/out")
line "a run of signs" "$gpu" 40 'of 1 groups' "$programs/meander" "${paint[@]}" --store "$store/gpu" --run gpu --device "$device" --save-latents "$store/gpu.safetensors" 'a red sign that says "OPEN"'
line "verify of that run" "the run above" 30 'ratio' "$programs/meander" verify --store "$store/gpu" --run gpu --device "$device"
line "the same run on the CPU" "programs of make gpu-programs" 40 'of 1 groups' "$programs/meander" "${paint[@]}" --store "$store/cpu" --run cpu --device cpu --save-latents "$store/cpu.safetensors" 'a red sign that says "OPEN"'
line "states of both runs" "the two runs above" 10 'bits' "$python" -c '
import array, json, struct, sys
def states(path):
    b = open(path, "rb").read()
    n = struct.unpack("<Q", b[:8])[0]
    head = {int(k.rsplit(".", 1)[1]): v for k, v in json.loads(b[8:8 + n]).items() if ".latents." in k}
    first, last = (b[8 + n:][slice(*head[i]["data_offsets"])] for i in (0, max(head)))
    return first, array.array("f", last)
(a, x), (b, y) = map(states, sys.argv[1:])
assert a and any(a) and a == b, "the initial states differ"
norm = lambda x: sum(v * v for v in x) ** 0.5
off = norm([u - v for u, v in zip(x, y)]) / norm(y)
assert off < 1e-3, f"the last states are {off:.2g} apart"
print(f"the initial ones are the same {8 * len(a)} bits; the last ones {off:.2g} apart, at most 0.001")' "$store/gpu.safetensors" "$store/cpu.safetensors"
say
say "## Fast"
say
if ! timeout --kill-after=5 200 "$programs/bench" gpu --device "$device" ${SMALL:+--small --round 20ms} --peer "$python deploy/bench/gpu_peer.py" 2>"$store/err" | tee -a "$report" >"$store/fast" || ! [ -s "$store/fast" ]; then
	missed=$((missed + 1))
	say "| what | result |"
	say "| --- | --- |"
	why=$(tail -n 1 "$store/err" | cut -c 1-300)
	for what in 'matrix products, TFLOP/s' 'attention, TFLOP/s' 'copies, GB/s' 'launch overhead' 'evaluations and images/s at 512 and 1024 pixels, batch 1, 4, 8, with guidance' 'memory at its largest' 'share of each kernel'; do
		say "| $what | **not measured**: needs $gpu; beside PyTorch, $python with torch for CUDA; $why |"
	done
else
	cat "$store/fast"
	say
	say "$(grep -h gpu_peer.py: "$store/err")"
fi
say
say "## Publishing"
say
say "| what | result |"
say "| --- | --- |"
line "share of a sample's time outside of the model" "the run above" 20 '%' "$python" -c '
import json, subprocess, sys
out = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, check=True, text=True).stdout
ts = [json.loads(line)["event"]["timings"] for line in out.splitlines()]
device = sum(t["encode_ns"] + t["denoise_ns"] + t["decode_ns"] for t in ts)
whole = sum(t["finished"] - t["received"] for t in ts)
print(f"{100 * (1 - device / whole):.2f} % of {whole / 1e9 / len(ts):.2f} s, {len(ts)} samples")' "$programs/meander" watch --store "$store/gpu" --run gpu --kinds trajectory --json --count "$samples"
say
say "$missed lines not measured. Took $SECONDS s."
