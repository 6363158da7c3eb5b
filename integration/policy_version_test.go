package integration_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
	"github.com/meander-rl/meander/services/verify"
)

// Prompts that ask for versions are made with them, beside each other and beside the newest, with the bits that the
// version had alone. One that is still to come is waited for, one that cannot be there is refused.
func TestPolicy_AtVersion(t *testing.T) {
	if raceEnabled {
		t.Skip("the networks take minutes under the race detector")
	}
	t.Parallel()
	plane, peer, base := signsPlane(t, 1, func(c *pipeline.Config) {
		c.Sampler.Batch, c.Sampler.Resident = 4, 1 // fewer than are asked for at once
	})
	d := widthOfSigns(t, plane.Bus, base)
	ask := func(run schemas.Run, version *int64) {
		t.Helper()
		if err := publishSign(t, peer, run, schemas.Routing{PolicyVersion: version}); err != nil {
			t.Fatal(err)
		}
	}
	made := func(run schemas.Run) (digests [2]string, version int64) {
		t.Helper()
		stored := bustest.Await(t, plane.Bus, 2, schemas.StreamTrajectories, schemas.TrajectoryFilter(run, "g"))
		for _, m := range stored {
			x := bustest.Decode[schemas.Trajectory](t, m)
			if x.StopReason != schemas.StopCompleted || x.PolicyVersionMin != x.PolicyVersionMax {
				t.Fatalf("%s: %+v", run, x)
			}
			digests[x.SampleIndex], version = x.Media[0].Digest, x.PolicyVersionMax
		}
		return digests, version
	}
	seed := uint64(0)
	push := func(as client.Push) (*schemas.Policy, error) {
		seed++
		return peer.PushPolicy(t.Context(), parsedLoRA(t, loraFile(t, projection, d, d, 4, seed, 0)), as)
	}
	alone := map[int64][2]string{}
	for version := range int64(3) {
		if version > 0 {
			pushed, err := push(client.Push{})
			if err == nil {
				_, err = peer.AwaitPolicy(t.Context(), pushed)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		run := schemas.Run(fmt.Sprint("newest-", version))
		ask(run, nil)
		digests, of := made(run)
		if alone[version] = digests; of != version {
			t.Fatalf("the newest is %d; want %d", of, version)
		}
	}
	if alone[0] == alone[1] || alone[1] == alone[2] {
		t.Fatal("the versions make the same images")
	}
	later := make(chan error, 1)
	go func() { later <- publishSign(t, peer, "later", schemas.Routing{PolicyVersion: new(int64(3))}) }()
	for round := range 2 {
		for version := range int64(3) {
			ask(schemas.Run(fmt.Sprintf("at-%d-%d", version, round)), &version)
		}
	}
	for round := range 2 {
		for version := range int64(3) {
			run := schemas.Run(fmt.Sprintf("at-%d-%d", version, round))
			if digests, of := made(run); of != version || digests != alone[version] {
				t.Errorf("%s is of version %d, with the bits of that alone: %t", run, of, digests == alone[version])
			}
			bustest.Await(t, plane.Bus, 1, schemas.StreamAdvantages, schemas.AdvantageSubject(run, "*"))
			checkVerified(t, plane, run)
		}
	}
	if _, err := push(client.Push{Version: 4}); err != nil {
		t.Fatal(err)
	}
	want := `policy_version: 3; version 3 of lane "signs": not found; must be one of 4, 2, 1, 0`
	if err := <-later; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("a version that was left out: %v; want %s", err, want)
	}
}

// Tenants of a lane have versions of their own: what one pushes changes no sample of another, which has the bits that
// it has alone. Each goes back alone, and one that nobody began is refused.
func TestPolicy_Tenants(t *testing.T) {
	if raceEnabled {
		t.Skip("the networks take minutes under the race detector")
	}
	t.Parallel()
	plane, peer, base := signsPlane(t, 1, func(c *pipeline.Config) {
		c.Sampler.Batch, c.Sampler.Resident = 4, 1 // fewer than there are tenants
	})
	d := widthOfSigns(t, plane.Bus, base)
	push := func(tenant schemas.Tenant, seed uint64) *schemas.Policy {
		t.Helper()
		p, err := peer.PushPolicy(t.Context(), parsedLoRA(t, loraFile(t, projection, d, d, 4, seed, 0)),
			client.Push{Tenant: tenant})
		if err == nil {
			_, err = peer.AwaitPolicy(t.Context(), p)
		}
		if err != nil || p.Lineage() != schemas.Lane("signs").Of(tenant) {
			t.Fatalf("push for %q: %+v, %v", tenant, p, err)
		}
		return p
	}
	made := func(run schemas.Run, tenant schemas.Tenant, want *schemas.Policy) (digests [2]string) {
		t.Helper()
		stored := bustest.Await(t, plane.Bus, 2, schemas.StreamTrajectories, schemas.TrajectoryFilter(run, "g"))
		for _, m := range stored {
			x := bustest.Decode[schemas.Trajectory](t, m)
			if x.StopReason != schemas.StopCompleted || x.Tenant != tenant || x.WeightsDigest != want.WeightsDigest ||
				x.PolicyVersionMin != want.PolicyVersion {
				t.Fatalf("%s: %+v; want version %d of %q", run, x, want.PolicyVersion, tenant)
			}
			digests[x.SampleIndex] = x.Media[0].Digest
		}
		bustest.Await(t, plane.Bus, 1, schemas.StreamAdvantages, schemas.AdvantageSubject(run, "*"))
		checkVerified(t, plane, run)
		return digests
	}
	of := func(tenant schemas.Tenant) schemas.Routing { return schemas.Routing{Tenant: tenant} }
	err := publishSign(t, peer, "nobody", of("a"))
	if err == nil || !strings.Contains(err.Error(), "must be one of main") {
		t.Errorf("a tenant that nobody began: %v", err)
	}
	now := map[schemas.Tenant]*schemas.Policy{"": base, "a": push("a", 1), "b": push("b", 2)}
	alone, first := map[schemas.Tenant][2]string{}, now["b"]
	for round := range 3 {
		for tenant := range now { // all at once, in any order
			if err := publishSign(t, peer, schemas.Run(fmt.Sprint("r", round, "-", tenant)), of(tenant)); err != nil {
				t.Fatal(err)
			}
		}
		for tenant, p := range now {
			got := made(schemas.Run(fmt.Sprint("r", round, "-", tenant)), tenant, p)
			if round == 0 {
				alone[tenant] = got
			} else if (got == alone[tenant]) != (tenant != "b") {
				t.Errorf("round %d of %q: the images of round 0: %t", round, tenant, got == alone[tenant])
			}
		}
		if now["b"] = push("b", uint64(3+round)); now["b"].PolicyVersion != int64(2+round) {
			t.Errorf("version %d of b; want %d", now["b"].PolicyVersion, 2+round)
		}
	}
	if alone[""] == alone["a"] || alone["a"] == alone["b"] {
		t.Error("tenants make the same images")
	}
	checkProved(t, plane.Bus, "r0-b", first)
	back, err := peer.RollbackPolicy(t.Context(), 1, client.Push{Tenant: "b"})
	if err == nil {
		_, err = peer.AwaitPolicy(t.Context(), back)
	}
	if err == nil {
		err = publishSign(t, peer, "back", of("b"))
	}
	if err != nil || made("back", "b", back) != alone["b"] {
		t.Errorf("b after its rollback: %+v, %v", back, err)
	}
}

// checkVerified computes the log-probs of two samples of signs again: they must be those that are stored.
func checkVerified(t *testing.T, plane *bustest.Plane, run schemas.Run) {
	t.Helper()
	x, err := verify.Run(t.Context(), plane.Bus, run, verify.Options{Model: []string{signsFolder}})
	if err != nil || x.Trajectories != 2 || x.MaxRatio != 0 || len(x.Mismatches) > 0 || x.Unproven != "" {
		t.Errorf("%s: %+v, %v", run, x, err)
	}
}

// publishSign asks for two samples of signs. An error is intake's.
func publishSign(t *testing.T, peer *client.Client, run schemas.Run, with schemas.Routing) error {
	_, err := peer.Publish(t.Context(), run, &schemas.Prompt{
		UID: "g", Prompt: `a sign that says "fox"`, GroupSize: new(int64(2)), Seed: new(int64(3)),
		ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(3))},
		Routing:       with,
	})
	return err
}
