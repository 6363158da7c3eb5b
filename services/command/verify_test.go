package command

import "testing"

func TestVerify(t *testing.T) {
	inStore(t)
	expect(t, exitOK, "run r1: 2 trajectories, 2 log-probs recomputed\nmax |ratio-1| = 0\n0 mismatches\nverified\n", "verify")
	expect(t, exitOK, "run r1: 2 trajectories", "verify", "r1", "--model", "synthetic", "--lane", "synthetic", "--uid", "p")
	expect(t, exitUsage, `RUN: "r1", and --run "r2"; name one of them`, "verify", "r1", "--run", "r2")
	expect(t, exitUsage, `--lane: "a b"`, "verify", "--lane", "a b")
	expect(t, exitFailed, "not verified: lane synthetic: 2 of the samples are of the model \"synthetic\"", "verify", "--model", "synthetic-v")
	lines := linesOf(t, expect(t, exitOK, "", "verify", "--run", "r1", "--json"))
	if len(lines) != 1 || lines[0]["steps"] != 2.0 || lines[0]["max_abs_ratio_minus_1"] != 0.0 {
		t.Errorf("JSON %v", lines)
	}
	expect(t, exitUsage, "say where it is with --model", "verify", "--model", "/does/not/exist")
	expect(t, exitFailed, `run "r2" has no stored trajectories`, "verify", "--run", "r2")
	expect(t, exitOK, "", append([]string{"run", "--run", "bare", "--seed", "3"}, append(small, "--return-steps", "3")...)...)
	expect(t, exitFailed, "not verified: nothing was checked: no step has both latents", "verify", "--run", "bare")
}
