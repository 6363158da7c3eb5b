package client_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
)

// Each rule leaves out what is beyond it, with the reason, and nothing else.
func TestClient_FreshGroups(t *testing.T) {
	c := connect(t, newPipeline(t, "").url)
	for _, uid := range []schemas.UID{"a", "b"} {
		publish(t, c, "r", prompt(uid))
	}
	all := groups(t, c, "r", "", 2)
	made, err := c.Trajectory(t.Context(), "r", "a", 0)
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		want   client.Fresh
		change func(*client.Group)
		why    string
	}{
		"all":             {client.Fresh{}, nil, ""},
		"failed":          {client.Fresh{}, func(g *client.Group) { g.Status = schemas.StatusFailed }, "status failed"},
		"old":             {client.Fresh{Oldest: 3}, func(g *client.Group) { g.PolicyVersionMin, g.PolicyVersionMax = 2, 4 }, "policy version 2; must be 3 or newer"},
		"new enough":      {client.Fresh{Oldest: 3}, func(g *client.Group) { g.PolicyVersionMin, g.PolicyVersionMax = 3, 4 }, ""},
		"span":            {client.Fresh{MaxPolicySpan: 1}, func(g *client.Group) { g.PolicyVersionMin, g.PolicyVersionMax = 3, 4 }, "policy versions 3 to 4 are a span of 2; must be at most 1"},
		"span allowed":    {client.Fresh{MaxPolicySpan: 2}, func(g *client.Group) { g.PolicyVersionMin, g.PolicyVersionMax = 3, 4 }, ""},
		"age":             {client.Fresh{MaxAge: time.Hour}, func(g *client.Group) { g.Closed -= 2 * time.Hour.Nanoseconds() }, "closed 2h0m0s ago; must be at most 1h0m0s"},
		"young":           {client.Fresh{MaxAge: time.Hour}, nil, ""},
		"other weights":   {client.Fresh{WeightsDigest: "0123456789abcdef0"}, nil, "weights " + made.WeightsDigest[:16] + " of sample 0; must be 0123456789abcdef"},
		"the weights":     {client.Fresh{WeightsDigest: made.WeightsDigest}, nil, ""},
		"no trajectories": {client.Fresh{WeightsDigest: made.WeightsDigest}, func(g *client.Group) { g.UID = "nobody" }, "error"},
	} {
		g := *all[0]
		if tt.change != nil {
			tt.change(&g)
		}
		why, err := c.OffPolicy(t.Context(), &g, tt.want)
		if errors.Is(err, client.ErrNotFound) {
			why, err = "error", nil
		}
		if err != nil || strings.Replace(why, "2h0m1s", "2h0m0s", 1) != tt.why {
			t.Errorf("%s: %q, %v; want %q", name, why, err, tt.why)
		}
	}
	staged := *all[0]
	staged.Members = []schemas.Member{{Status: schemas.StatusScored, Stages: []schemas.StageResult{{Stage: "think"}}}}
	for _, want := range []client.Fresh{{Oldest: 1}, {MaxPolicySpan: 1}, {WeightsDigest: made.WeightsDigest}} {
		_, err := c.OffPolicy(t.Context(), &staged, want)
		if err == nil || !strings.Contains(err.Error(), "of one lane") {
			t.Errorf("%+v of samples of several lanes: %v", want, err)
		}
	}
	if why, err := c.OffPolicy(t.Context(), &staged, client.Fresh{MaxAge: time.Hour}); why != "" || err != nil {
		t.Errorf("an age of samples of several lanes: %q, %v", why, err)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var out []schemas.UID
	for g, err := range c.FreshGroups(ctx, "r", "", client.Fresh{Oldest: 1}, func(g *client.Group, why string) {
		if out = append(out, g.UID); len(out) == 2 {
			stop()
		}
	}) {
		t.Fatalf("%+v, %v; want none", g, err)
	}
	if slices.Sort(out); !slices.Equal(out, []schemas.UID{"a", "b"}) {
		t.Errorf("left out %v", out)
	}
	for g, err := range c.FreshGroups(t.Context(), "r", all[0].Cursor, client.Fresh{}, nil) {
		if err != nil || g.UID != all[1].UID || g.Cursor != all[1].Cursor {
			t.Errorf("behind the first: %v, %v", g.UID, err)
		}
		break
	}
}
