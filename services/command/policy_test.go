package command

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// inEmptyStore has the commands of a test, which runs alone, take an empty store, and returns the path of an adapter.
func inEmptyStore(t *testing.T) (adapter string) {
	t.Helper()
	bustest.Sequential(t, others)
	adapter, err := filepath.Abs("../../deploy/demo/adapter")
	if err != nil {
		t.Fatal(err)
	}
	inEmptyDir(t)
	t.Setenv("MEANDER_STORE", "store")
	return adapter
}

// Two versions make the same samples: the runs differ in their weights alone, and one is better or not.
func TestPolicy_Compare(t *testing.T) {
	adapter := inEmptyStore(t)
	common := []string{
		"-n", "2", "--steps", "4", "--reward", "glyph", "--out", "-",
		`a sign that says "FOX"`, `a sign that says "4071"`,
	}
	expect(t, exitOK, "", append([]string{"run", "--run", "newest", "--seed", "0"}, common...)...)
	expect(t, exitOK, "version 1 after 0", "policy", "push", adapter, "--wait", "0")
	var x view.Comparison
	said := expect(t, exitOK, "", append([]string{"policy", "compare", "0", "1", "--run", "ab", "--json"},
		common...)...)
	if err := json.Unmarshal([]byte(said), &x); err != nil {
		t.Fatal(err)
	}
	if x.Total != 2 || x.MeanA == nil || x.ChangeError == nil || x.Better+x.Worse+x.Equal != 2 || len(x.Settings) != 2 {
		t.Errorf("compared %s", said)
	}
	expect(t, exitOK, "ab-v0 is better at 0 prompts, worse at 0, equal at 2", "runs", "compare", "newest", "ab-v0")
	conn, err := (&app{store: "store", logLevel: "error"}).connect(t.Context(), zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	second, err := conn.Last(t.Context(), schemas.StreamPrompts, schemas.PromptSubject("ab-v1"))
	if err != nil {
		t.Fatal(err)
	}
	first, err := conn.Last(t.Context(), schemas.StreamAdvantages, schemas.AdvantageSubject("ab-v0", "*"))
	if err != nil || !second.Time.Before(first.Time) {
		t.Errorf("the second run began at %v, when the first had ended, at %v; %v", second.Time, first.Time, err)
	}
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	for want, given := range map[string][]string{
		"VERSION: 9; version 9 of lane \"signs\": not found; must be one of 1, 0": {"0", "9", "a", "--run", "none"},
		"must be the numbers of two versions":                                     {"0"},
		`"one"; must be the number of a version`:                                  {"0", "one", "a"},
		"1 twice; must be two versions":                                           {"1", "1", "a"},
		"--dry-run: given; must be absent":                                        {"0", "1", "a", "--dry-run"},
		"(--at-version): given of prompt":                                         {"0", "1", "a", "--at-version", "1"},
	} {
		expect(t, exitUsage, want, append([]string{"policy", "compare"}, given...)...)
	}
	for _, name := range []string{"nope", "none-v0"} {
		expect(t, exitFailed, "nothing is stored of it", "runs", "compare", "ab-v0", name)
	}
}

// A tenant goes with all its versions once nothing needs them, and its name begins again.
func TestPolicy_Remove(t *testing.T) {
	adapter := inEmptyStore(t)
	run := func(name string, more ...string) []string {
		return append([]string{
			"run", "--run", name, "-n", "2", "--steps", "4", "--reward", "glyph", "--out", "-",
			`a sign that says "FOX"`,
		}, more...)
	}
	push := []string{"policy", "push", adapter, "--tenant", "alice", "--wait", "0"}
	expect(t, exitOK, "", run("first")...)
	expect(t, exitOK, "version 1 after 0", push...)
	expect(t, exitOK, "", run("of-alice", "--tenant", "alice")...)
	expect(t, exitOK, "policy_version: 2; lane \"signs.alice\" serves version 1", run("dry", "--tenant", "alice",
		"--at-version", "2", "--dry-run")...)
	expect(t, exitUsage, `"bob" has no weights on lane "signs"; must be one of alice, main`, run("dry", "--tenant", "bob",
		"--dry-run")...)
	for want, given := range map[string][]string{
		"runs rm of-alice": {"--tenant", "alice"},
		`--tenant: "bob"; must be one of main, alice`: {"--tenant", "bob"},
		"must be another than main":                   {},
		`tenant: "main"; must be another than main`:   {"--tenant", "main"},
		`--lane: "other"; must be one of signs`:       {"--tenant", "alice", "--lane", "other"},
		`--tenant: "a.b"; must be`:                    {"--tenant", "a.b"},
		`'meander policy rm' takes no arguments`:      {"alice"},
	} {
		expect(t, exitUsage, want, append([]string{"policy", "rm"}, given...)...)
	}
	expect(t, exitOK, "run of-alice", "runs", "rm", "of-alice")
	expect(t, exitOK, "tenant alice: 2 versions removed", "policy", "rm", "--tenant", "alice")
	if said := expect(t, exitOK, "", "policy", "ls"); strings.Contains(said, "alice") {
		t.Errorf("after rm: %s", said)
	}
	expect(t, exitUsage, `"alice"; must be one of main`, "policy", "ls", "--tenant", "alice")
	expect(t, exitUsage, `"alice"; must be one of main`, "policy", "rm", "--tenant", "alice")
	expect(t, exitUsage, `tenant: "alice" has no weights`, run("late", "--tenant", "alice")...)
	expect(t, exitOK, "version 1 after 0", push...)
}

// A version that samplers have refused is listed as such, and the current one is that before it.
func TestPolicy_Refused(t *testing.T) {
	inEmptyDir(t)
	conn, err := (&app{store: "meander-data", logLevel: "error"}).connect(t.Context(), zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	base := &schemas.Policy{
		Tenant: schemas.TenantMain,
		Lane:   "one", Model: "one", Family: "synthetic", WeightsDigest: "base", BaseDigest: "base", Height: 64, Width: 64,
		NumInferenceSteps: 1, TrueCFGScale: 1,
		LatentChannels: 64, PixelsPerToken: 16, MaxPixels: 1 << 20,
	}
	pushed := *base
	pushed.PolicyVersion, pushed.WeightsDigest, pushed.Note = 1, "adapted", "update 1"
	pushed.Adapter = &schemas.PolicyAdapter{Scale: 1, File: schemas.Ref{
		Bucket: schemas.BlobBucket,
		Digest: strings.Repeat("a", 64), Size: 1,
	}}
	if err := conn.SetPolicy(t.Context(), base, nil); err != nil {
		t.Fatal(err)
	}
	if err := conn.SetPolicy(t.Context(), &pushed, base); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Publish(t.Context(), &schemas.Applied{
		Tenant: schemas.TenantMain,
		Lane:   "one", Instance: "sampler-1", PolicyVersion: 1, State: schemas.AppliedRefused, Error: "canary: the same",
		WeightsDigest: "base",
	}); err != nil {
		t.Fatal(err)
	}
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	lines := linesOf(t, expect(t, exitOK, "", "policy", "ls", "--json"))
	if len(lines) != 2 || lines[0]["current"] != true || lines[1]["current"] != false ||
		lines[1]["refused"] != "canary: the same" {
		t.Errorf("versions %v", lines)
	}
	if said := expect(t, exitOK, "0*  ", "policy", "ls"); !strings.Contains(said, "refused; update 1") ||
		!strings.Contains(said, "none runs; the next one starts on version 0") {
		t.Errorf("versions\n%s", said)
	}
	expect(t, exitOK, "version    0\n", "policy", "show")
	expect(t, exitOK, "refused in 0 ms", "policy", "show", "1")
	expect(t, exitUsage, "version: 1; was refused by the samplers (canary: the same); must be one that was taken over",
		"policy", "rollback", "1", "--wait", "0")
}

// A version or a lane that is not there is answered with those that are.
func TestPolicy_NotThere(t *testing.T) {
	bustest.Sequential(t, others)
	inStore(t)
	expect(t, exitUsage, `version 99 of lane "synthetic": not found; must be one of 0`, "policy", "rollback", "99")
	expect(t, exitUsage, "VERSION: 99; must be one of lane synthetic: 0", "policy", "show", "99")
	for _, args := range [][]string{{"policy", "ls"}, {"policy", "show"}, {"policy", "rollback", "0"}} {
		expect(t, exitUsage, `--lane: "signs"; must be one of synthetic`, append(args, "--lane", "signs")...)
	}
}
