package command

import (
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

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
