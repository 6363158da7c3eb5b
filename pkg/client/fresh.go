package client

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/meander-rl/meander/schemas"
)

// Fresh says which groups are close enough to a policy to train it. The zero value accepts all groups that have
// advantages.
type Fresh struct {
	// Oldest is the oldest version of the weights that samples may have.
	Oldest int64
	// MaxPolicySpan is the most versions, newest - oldest + 1, that the samples of a group may have; 0: any.
	MaxPolicySpan int64
	// MaxAge is how long ago a group may have closed; 0: any time.
	MaxAge time.Duration
	// WeightsDigest is the digest of the weights that samples must have; empty: any.
	WeightsDigest string
}

// OffPolicy says why a trainer with these demands on freshness must not train on a group; "" if it may. Only for a
// demand on weights it fetches trajectories; an error means that one could not be read.
func (c *Client) OffPolicy(ctx context.Context, g *Group, want Fresh) (why string, err error) {
	span, age := g.PolicyVersionMax-g.PolicyVersionMin+1, time.Since(time.Unix(0, g.Closed))
	switch {
	case g.Status != schemas.StatusComplete && g.Status != schemas.StatusPartial:
		return "status " + g.Status, nil
	case severalLanes(g) && (want.Oldest > 0 || want.MaxPolicySpan > 0 || want.WeightsDigest != ""):
		return "", fmt.Errorf("group %s: versions and digests of weights are of one lane, and these samples have "+
			"several stages; leave out Oldest, MaxPolicySpan and WeightsDigest: the prompt's group_policy has the "+
			"rules of each lane", g.UID)
	case g.PolicyVersionMin < want.Oldest:
		return fmt.Sprintf("policy version %d; must be %d or newer", g.PolicyVersionMin, want.Oldest), nil
	case want.MaxPolicySpan > 0 && span > want.MaxPolicySpan:
		return fmt.Sprintf("policy versions %d to %d are a span of %d; must be at most %d", g.PolicyVersionMin,
			g.PolicyVersionMax, span, want.MaxPolicySpan), nil
	case want.MaxAge > 0 && age > want.MaxAge:
		return fmt.Sprintf("closed %v ago; must be at most %v", age.Round(time.Second), want.MaxAge), nil
	case want.WeightsDigest == "":
		return "", nil
	}
	for _, m := range g.Members {
		if m.Status != schemas.StatusScored {
			continue
		}
		t, err := c.Trajectory(ctx, cmp.Or(g.SourceRun, g.Run), g.UID, m.SampleIndex)
		if err != nil {
			return "", err
		}
		if t.WeightsDigest != want.WeightsDigest {
			return fmt.Sprintf("weights %.16s of sample %d; must be %.16s", t.WeightsDigest, m.SampleIndex,
				want.WeightsDigest), nil
		}
	}
	return "", nil
}

func severalLanes(g *Group) bool {
	return slices.ContainsFunc(g.Members, func(m schemas.Member) bool { return len(m.Stages) > 0 })
}

// FreshGroups is Groups without the groups that must not be trained on. For each of these it calls leftOut, unless
// that is nil, with the reason.
func (c *Client) FreshGroups(
	ctx context.Context, run schemas.Run, after Cursor, want Fresh, leftOut func(g *Group, why string),
) iter.Seq2[*Group, error] {
	return func(yield func(*Group, error) bool) {
		for g, err := range c.Groups(ctx, run, after) {
			why := ""
			if err == nil {
				why, err = c.OffPolicy(ctx, g, want)
			}
			if why != "" {
				if leftOut != nil {
					leftOut(g, why)
				}
				continue
			}
			if !yield(g, err) || err != nil {
				return
			}
		}
	}
}
