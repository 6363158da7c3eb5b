package client

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"iter"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
)

// Cursor is a position among the groups of a store, as text; empty: before all of them.
type Cursor = bus.Cursor

// Group is the result of a group.
type Group struct {
	schemas.Advantage
	// Cursor is the group's position: Groups continues after it.
	Cursor Cursor
}

// Groups yields the results of a run's groups in the order in which they closed: first the stored ones, then new ones
// as they close, until ctx ends.
//
// It starts after the group whose Cursor is after; empty: with the first. Each group is stored once and yielded once: a
// reader that saves the cursor together with its work on the group, and passes the last saved one to the next call, in
// any process, handles each group exactly once. A cursor for which this does not hold is refused. ErrCursor: it is from
// another store. ErrEvicted: the store's limits of age and size removed events after the cursor, perhaps groups of this
// run; an empty cursor then starts with what is left.
func (c *Client) Groups(ctx context.Context, run schemas.Run, after Cursor) iter.Seq2[*Group, error] {
	return func(yield func(*Group, error) bool) {
		events := readLive[schemas.Advantage](ctx, c.bus, run, schemas.StreamAdvantages,
			schemas.AdvantageSubject(run, "*"), after)
		for m, err := range events {
			if !yield(&Group{Advantage: m.event, Cursor: m.cursor}, err) {
				return
			}
		}
	}
}

// Trajectories yields the trajectories of a run as they are stored, first those stored before the call, until ctx
// ends.
func (c *Client) Trajectories(ctx context.Context, run schemas.Run) iter.Seq2[*schemas.Trajectory, error] {
	return func(yield func(*schemas.Trajectory, error) bool) {
		for m, err := range readLive[schemas.Trajectory](ctx, c.bus, run, schemas.StreamTrajectories,
			schemas.TrajectoryFilter(run, "*"), "") {
			if !yield(&m.event, err) {
				return
			}
		}
	}
}

type positioned[T any] struct {
	event  T
	cursor Cursor
}

// readLive yields the stored and then the new events of a run, of one type, until ctx ends; Groups and Trajectories
// are made of it. It skips messages that are not valid events of their subject: services remove these, and the true
// event comes later. After an error it ends.
func readLive[T any, E interface {
	*T
	schemas.Keyed
}](ctx context.Context, b *bus.Bus, run schemas.Run, stream, filter string, after Cursor) iter.Seq2[*positioned[T],
	error] {
	return func(yield func(*positioned[T], error) bool) {
		if err := schemas.CheckToken("run", run); err != nil {
			yield(&positioned[T]{}, err)
			return
		}
		for m, err := range b.Read(ctx, stream, []string{filter}, bus.ReadOptions{Live: true, After: after}) {
			e := &positioned[T]{}
			if err == nil {
				if bus.Fits(m, E(&e.event)) != nil {
					continue
				}
				e.cursor = m.Cursor()
			}
			if ctx.Err() != nil || !yield(e, err) || err != nil {
				return
			}
		}
	}
}

// Trajectory returns one stored trajectory, or ErrNotFound. A sample of several stages has one for each, which Stage
// returns, so it is refused.
func (c *Client) Trajectory(
	ctx context.Context, run schemas.Run, uid schemas.UID, sample int64,
) (*schemas.Trajectory, error) {
	return c.Stage(ctx, run, uid, sample, schemas.StageMain)
}

// Stage returns the stored trajectory of a stage of a sample, or ErrNotFound, which names the stages that there are
// where this is none of them. The stage of round 2 is NAME-2. What several samples share is stored once: Members of a
// group's result say under which index (StageResult).
func (c *Client) Stage(
	ctx context.Context, run schemas.Run, uid schemas.UID, sample int64, stage schemas.Stage,
) (*schemas.Trajectory, error) {
	m, err := c.bus.Last(ctx, schemas.StreamTrajectories, schemas.TrajectorySubject(run, uid, sample, stage))
	if err != nil {
		return nil, fmt.Errorf("trajectory %s %d of run %s: %w%s", uid, sample, run, err,
			c.otherStages(ctx, run, uid, stage))
	}
	var t schemas.Trajectory
	return &t, bus.Fits(m, &t)
}

// otherStages says which stages the samples of a group have, where the given one is none of them.
func (c *Client) otherStages(ctx context.Context, run schemas.Run, uid schemas.UID, stage schemas.Stage) string {
	g, err := c.bus.Group(ctx, run, uid)
	if err != nil || g.Group.StageIndex(stage) >= 0 {
		return ""
	}
	var names []string
	for _, s := range g.Group.Stages {
		names = append(names, string(s.Name))
	}
	switch {
	case len(names) > 0:
		return fmt.Sprintf(": stage %q; must be one of %s, in round 2 %s-2: read each with Stage", stage,
			strings.Join(names, ", "), names[0])
	case stage != schemas.StageMain:
		return fmt.Sprintf(": stage %q; its sample has no stages: read it with Trajectory", stage)
	}
	return ""
}

// Steps returns the step events of a trajectory in order, for the steps that ran (Segment), with their latents. They
// are checked against the digests in the trajectory (ErrCorrupt). Steps that are no longer stored are ErrNotFound. A
// sample with a setting that this version does not know is refused: nothing can be computed from its steps.
func (c *Client) Steps(ctx context.Context, t *schemas.Trajectory) ([]*schemas.Step, error) {
	if err := t.CheckKnown(); err != nil {
		return nil, fmt.Errorf("sample %s #%d: %w", t.UID, t.SampleIndex, err)
	}
	steps := make([]*schemas.Step, len(t.Steps))
	begin, _ := t.Segment()
	for i := range t.Steps {
		var err error
		if steps[i], err = c.bus.LoadStepOf(ctx, t, i); err != nil {
			return nil, fmt.Errorf("step %d: %w", begin+int64(i), err)
		}
		if err := steps[i].CheckKnown(); err != nil {
			return nil, fmt.Errorf("sample %s #%d, step %d: %w", t.UID, t.SampleIndex, begin+int64(i), err)
		}
	}
	return steps, nil
}

// Tokens yields the token events of a text trajectory in order, with the stored logits, one at a time because full
// logits are large. They are checked against the digests in the trajectory (ErrCorrupt). Events that are no longer
// stored are ErrNotFound.
func (c *Client) Tokens(ctx context.Context, t *schemas.Trajectory) iter.Seq2[*schemas.Tokens, error] {
	return func(yield func(*schemas.Tokens, error) bool) {
		for i := range t.Steps {
			e, err := c.bus.LoadTokensOf(ctx, t, i)
			if err != nil {
				err = fmt.Errorf("tokens %d: %w", i, err)
			}
			if !yield(e, err) || err != nil {
				return
			}
		}
	}
}

// Choice is a token that a model could have drawn, and its log-prob by the stored logits, in nats.
type Choice struct {
	ID      int32
	LogProb float64
}

// Likeliest returns, of each token of an event that has the logits of topk, the likeliest most tokens, the likeliest
// first. It fails if the event has no such logits.
func Likeliest(e *schemas.Tokens, most int) ([][]Choice, error) {
	l := e.Logits
	if l == nil || l.Form != schemas.LogitsTopK || l.IDs == nil || len(l.Values.Shape) != 2 || l.Values.Shape[1] < 1 {
		return nil, fmt.Errorf("tokens %d: they have no logits of %s", e.N, schemas.LogitsTopK)
	}
	k := int(l.Values.Shape[1])
	values := make([]float32, l.Values.Shape[0]*l.Values.Shape[1])
	if err := tensor.DType(l.Values.DType).DecodeFloats(values, l.Values.Data); err != nil {
		return nil, fmt.Errorf("tokens %d: logits: %w", e.N, err)
	}
	if len(l.IDs.Data) != 4*len(values) || len(e.LogSumExps)*k != len(values) {
		return nil, fmt.Errorf("tokens %d: %d logits do not fit %d bytes of ids and %d tokens", e.N, len(values),
			len(l.IDs.Data), len(e.LogSumExps))
	}
	out := make([][]Choice, len(e.LogSumExps))
	for i := range out {
		for j := i * k; j < i*k+min(k, most) && !math.IsInf(float64(values[j]), -1); j++ {
			id := int32(binary.LittleEndian.Uint32(l.IDs.Data[4*j:]))
			out[i] = append(out[i], Choice{id, float64(values[j]) - float64(e.LogSumExps[i])})
		}
	}
	return out, nil
}

// Latents returns the kept states of a trajectory by index, packed [S, C] in row-major order: index 0 is x_T, k the
// state before step k, and the number of steps the final state. F16 and BF16 are widened to float32 exactly. Errors
// are those of Steps: ErrCorrupt and ErrNotFound.
func (c *Client) Latents(ctx context.Context, t *schemas.Trajectory) (map[int64][]float32, error) {
	steps, err := c.Steps(ctx, t)
	if err != nil {
		return nil, err
	}
	out := map[int64][]float32{}
	for _, s := range steps {
		for _, l := range s.Latents {
			width, _ := schemas.DTypeSize(l.Tensor.DType)
			x := make([]float32, len(l.Tensor.Data)/int(max(width, 1)))
			if err := tensor.DType(l.Tensor.DType).DecodeFloats(x, l.Tensor.Data); err != nil {
				return nil, fmt.Errorf("latents %d of sample %d: %w", l.Index, t.SampleIndex, err)
			}
			out[l.Index] = x
		}
	}
	return out, nil
}

// Condition returns a file that a trajectory was conditioned on, one of its Conditions: a PNG. ErrNotFound: it is no
// longer stored.
func (c *Client) Condition(ctx context.Context, of schemas.Condition) ([]byte, error) {
	return c.bus.GetBlob(ctx, *of.Ref)
}

// Medium returns a file of a sample by its kind: of an image a PNG; of a video an animated PNG, whose middle frame is
// the image; of an audio a WAV (media.Decode and media.DecodeWAV read them). ErrNoMedium: the sample has no such file,
// did not complete, or ends with noise in it. ErrNotFound: it is no longer stored.
func (c *Client) Medium(ctx context.Context, t *schemas.Trajectory, kind string) ([]byte, error) {
	m := t.Medium(kind)
	switch {
	case m == nil:
		why := "it " + t.StopReason
		if len(t.Media) > 0 {
			why = "it has " + strings.Join(t.MediaKinds(), ", ")
		} else if !t.Decoded() {
			why = "it stops with noise in it"
		}
		return nil, fmt.Errorf("trajectory %s %d: %s: %w: %s", t.UID, t.SampleIndex, kind, ErrNoMedium, why)
	case m.Ref == nil:
		return m.Data, nil
	}
	return c.bus.GetBlob(ctx, *m.Ref)
}

// PathStep is one step on the path to a sample, with the trajectory that it belongs to: the sample's own, or a
// parent's.
type PathStep struct {
	Trajectory *schemas.Trajectory
	Step       *schemas.Step
}

// maxParents bounds the parents on a path, so that trajectories that name one another in a circle end.
const maxParents = 1000

// Path returns every step that led to a sample's end, in order: first those of its parents, then its own.
// Trajectories of trees and branches name their parent; the first one began with noise or with given states.
// ErrNotFound: a parent, or a step, is no longer stored. Any other mismatch of parent and child is an error too.
func (c *Client) Path(ctx context.Context, t *schemas.Trajectory) ([]PathStep, error) {
	var path []PathStep
	_, end := t.Segment()
	for range maxParents {
		steps, err := c.Steps(ctx, t)
		if err != nil {
			return nil, fmt.Errorf("sample %d of group %s of run %s: %w", t.SampleIndex, t.UID, t.Run, err)
		}
		begin, stop := t.Segment()
		if stop < end || begin > end || int64(len(steps)) < end-begin {
			return nil, fmt.Errorf("sample %d of group %s of run %s: steps %d to %d; must lead to step %d, where "+
				"another parted from it", t.SampleIndex, t.UID, t.Run, begin, stop, end)
		}
		var own []PathStep
		for _, s := range steps[:end-begin] {
			own = append(own, PathStep{t, s})
		}
		path = slices.Concat(own, path)
		if t.Start == nil || t.Start.Branch == nil {
			return path, nil
		}
		at := t.Start.Branch
		if t, err = c.Stage(ctx, at.Run, at.UID, at.SampleIndex, at.Place().Stage); err != nil {
			return nil, err
		}
		end = begin
	}
	return nil, fmt.Errorf("sample %d of group %s of run %s: more than %d parents", t.SampleIndex, t.UID, t.Run,
		maxParents)
}

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
