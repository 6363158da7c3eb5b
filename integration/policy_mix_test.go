package integration_test

import (
	"fmt"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
)

// mixedRows returns the samples of calls of the network with several versions of the weights.
func mixedRows(t *testing.T, counted prometheus.Gatherer) (n float64) {
	t.Helper()
	families, err := counted.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != "meander_sampler_batch_rows_total" {
			continue
		}
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == "versions" && l.GetValue() != "1" {
					n += m.GetCounter().GetValue()
				}
			}
		}
	}
	return n
}

// Samples of several versions and tenants are in one call of the network, with the bits of each alone, while a version
// is pushed and another is refused.
func TestPolicy_OneCallOfVersions(t *testing.T) {
	if raceEnabled {
		t.Skip("the networks take minutes under the race detector")
	}
	t.Parallel()
	counted := prometheus.NewRegistry()
	w := start(t, func(c *config) {
		c.sampler.Model, c.sampler.Batch, c.sampler.Workers, c.sampler.Resident = signsFolder, 8, 1, 4
		c.sampler.Metrics = counted
	})
	d := widthOfSigns(t, w.Bus, served(t, w, 1, 0))
	push := func(seed uint64, scale float64, tenant schemas.Tenant, want string) {
		t.Helper()
		p, err := w.client.PushPolicy(t.Context(), parsedLoRA(t, loraFile(t, projection, d, d, 4, seed, 0)),
			client.Push{Tenant: tenant, Scale: scale})
		if err != nil {
			t.Fatal(err)
		}
		replicas, err := w.client.AwaitPolicy(t.Context(), p)
		if err != nil || len(replicas) != 1 || replicas[0].Answer == nil || replicas[0].Answer.State != want {
			t.Fatalf("the answer to version %d: %+v, %v; want %s", p.PolicyVersion, replicas, err, want)
		}
	}
	push(1, 1, "", schemas.AppliedApplied)
	push(2, 1, "", schemas.AppliedApplied)
	push(3, 1, "alice", schemas.AppliedApplied)
	asked := []schemas.Routing{
		{PolicyVersion: new(int64(0))},
		{PolicyVersion: new(int64(1))},
		{PolicyVersion: new(int64(2))},
		{Tenant: "alice"},
	}
	ask := func(name string, i int) schemas.Run {
		t.Helper()
		run := schemas.Run(fmt.Sprintf("%s-%d", name, i))
		if err := publishSign(t, w.client, run, asked[i]); err != nil {
			t.Fatal(err)
		}
		return run
	}
	var alone [4][2][32]byte
	for i := range asked {
		alone[i] = signDigests(t, w, ask("alone", i))
	}
	if alone[0] == alone[1] || alone[1] == alone[2] || alone[2] == alone[3] || mixedRows(t, counted) > 0 {
		t.Fatal("the versions make the same, or were in one call")
	}
	for round := 0; round < 2 || mixedRows(t, counted) == 0; round++ {
		if round == 20 {
			t.Fatal("no call had several versions, so this proves nothing")
		}
		name := fmt.Sprint("round", round)
		for i := range asked {
			ask(name, i)
		}
		if round == 0 {
			push(4, 1, "", schemas.AppliedApplied)
			push(4, 1+1e-15, "", schemas.AppliedRefused) // it changes nothing
		}
		for i := range asked {
			run := schemas.Run(fmt.Sprintf("%s-%d", name, i))
			if signDigests(t, w, run) != alone[i] {
				t.Errorf("%s: other digests than alone", run)
			}
			bustest.Await(t, w.Bus, 1, schemas.StreamAdvantages, schemas.AdvantageSubject(run, "*"))
			checkVerified(t, w.Plane, run)
		}
	}
	t.Logf("%g samples of evaluations were beside other versions", mixedRows(t, counted))
}

// signDigests returns the digests of the two samples of publishSign.
func signDigests(t *testing.T, w *world, run schemas.Run) (digests [2][32]byte) {
	t.Helper()
	for _, m := range bustest.Await(t, w.Bus, 2, schemas.StreamTrajectories, schemas.TrajectoryFilter(run, "g")) {
		x := bustest.Decode[schemas.Trajectory](t, m)
		digest, err := schemas.ContentDigest(x)
		if err != nil || x.StopReason != schemas.StopCompleted {
			t.Fatalf("%s: %+v, %v", run, x, err)
		}
		digests[x.SampleIndex] = digest
	}
	return digests
}
