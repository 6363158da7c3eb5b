package command

import (
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/meander-rl/meander/services/verify"
)

// What verify says, to people and in JSON, agrees with its exit status, and names the difference that is too large.
func TestVerify_TextAgreesWithTheStatus(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		r    verify.Report
		want string // empty: verified
	}{
		{verify.Report{Steps: 1}, ""},
		{verify.Report{Drawn: 1, EngineTolerance: 1e-3, MaxDrawnDifference: 1e-3}, ""},
		{verify.Report{
			Drawn: 1, EngineTolerance: 1e-3, MaxDrawnDifference: .17, Deviations: 3,
			Worst: &verify.Deviation{
				UID: "u", SampleIndex: 2, Token: new(int64(9)), Quantity: "log_prob", Passes: 1e-3, Why: "for this",
			},
		}, "3 numbers"},
		{verify.Report{Tokens: 1, MaxTokenDifference: .5}, "0.5; at most 0.25 passes (--tolerance)"},
		{verify.Report{Steps: 1, MaxRatio: .3}, "|ratio-1| is 0.3"},
		{verify.Report{Rolled: 1, MaxRolled: .3}, "state computed again is 0.3"},
		{verify.Report{Steps: 1, MaxConditioning: .3}, "prompt embedding or mask is 0.3"},
		{verify.Report{Steps: 1, Mismatches: []verify.Mismatch{{What: "x"}}}, "mismatches: 1"},
		{verify.Report{Unproven: "nothing was checked"}, "nothing was checked"},
		{verify.Report{Steps: 1, MaxRatio: verify.Difference(math.NaN())}, "NaN"},
		{verify.Report{Tokens: 1, MaxTokenDifference: verify.Difference(math.Inf(1))}, "+Inf"},
	} {
		for _, asJSON := range []bool{false, true} {
			var out strings.Builder
			err := (&app{json: asJSON}).printVerify(&out, &tt.r, .25)
			says := strings.Contains(out.String(), "not verified: ")
			if asJSON {
				var verdict struct{ Verified bool }
				if err := json.Unmarshal([]byte(out.String()), &verdict); err != nil {
					t.Fatal(err)
				}
				says = !verdict.Verified
			}
			var exit *exitError
			if failed := errors.As(err, &exit); failed != says || failed != (tt.want != "") ||
				!strings.Contains(out.String(), tt.want) {
				t.Errorf("%+v: %v,\n%s\nwant %q", tt.r, err, out.String(), tt.want)
			}
		}
	}
}

func TestVerify(t *testing.T) {
	inStore(t)
	expect(t, exitOK, "run r1: 2 trajectories, 2 log-probs recomputed\nmax |ratio-1| = 0\n0 mismatches\nverified\n",
		"verify")
	expect(t, exitOK, "run r1: 2 trajectories", "verify", "r1", "--model", "synthetic", "--lane", "synthetic", "--uid",
		"p")
	expect(t, exitUsage, `RUN: "r1", and --run "r2"; give only one of them`, "verify", "r1", "--run", "r2")
	expect(t, exitUsage, `--dtype: "f16"; must be auto, f32 or bf16`, "verify", "r1", "--dtype", "f16")
	expect(t, exitUsage, `--dtype: "f8"; must be auto, f32 or bf16`, "verify", "r1", "--dtype", "f8")
	expect(t, exitUsage, "--tolerance: NaN; must not be negative", "verify", "--tolerance", "nan")
	expect(t, exitUsage, "--engine-tolerance: -1; must not be negative", "verify", "--engine-tolerance", "-1")
	expect(t, exitUsage, `--lane: "a b"`, "verify", "--lane", "a b")
	expect(t, exitFailed, "not verified: lane synthetic: 2 of the samples are of the model \"synthetic\"", "verify",
		"--model", "synthetic-v")
	lines := linesOf(t, expect(t, exitOK, "", "verify", "--run", "r1", "--json"))
	if len(lines) != 1 || lines[0]["steps"] != 2.0 || lines[0]["max_abs_ratio_minus_1"] != 0.0 {
		t.Errorf("JSON %v", lines)
	}
	expect(t, exitUsage, `--model: model "/does/not/exist": no such model`, "verify", "--model", "/does/not/exist")
	expect(t, exitFailed, `run "r2" has no stored trajectories`, "verify", "--run", "r2")
	expect(t, exitOK, "", append([]string{"run", "--run", "bare", "--seed", "3"},
		append(small, "--return-steps", "3")...)...)
	expect(t, exitFailed, "not verified: nothing was checked: no step has both latents", "verify", "--run", "bare")
}
