// Package results assembles what a run has stored, for commands that show it (meander run, show, rescore) and for Go
// programs: groups with their samples, rewards and advantages, the metrics, a digest of it all, and files of them.
//
// Outcomes follows the prompts while the run goes on. When all have an outcome, Collect makes a [Run] of it; Read
// makes one of whatever is stored so far. A pass is the same run scored again (meander rescore): CollectPass makes a
// [Pass]. A roll is what scheduled sampling did to a sample. A reading is the text that a reward function saw in an
// image. Messages that are not valid events are skipped: services remove them.
//
// Unless a comment says more, an error is of the server.
package results

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/counters"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
)

// Run is the outcome of a run. Its JSON is that of meander run --json.
type Run struct {
	Groups  []*Group // in the order of the prompts
	Summary Summary
}

// Group is the outcome of a prompt.
type Group struct {
	view.GroupResult
	// Group is the uid of the group that replaced the prompt's own; empty if none did.
	Group   schemas.UID   `json:"group,omitempty"`
	Members []view.Member `json:"members"`
	// Closed is when its last sample was scored, as the advantage event says; zero without a result.
	Closed time.Time `json:"-"`
	// Source is the run that has the samples, where this one is a pass over it; else empty.
	Source schemas.Run `json:"-"`
}

// Summary counts the results of a run.
type Summary struct {
	Run schemas.Run `json:"run"`
	// State is what became of the run, or running, as in schemas.RunStatus.
	State        string `json:"state"`
	Groups       int    `json:"groups"`
	Complete     int    `json:"complete"`
	Refused      int    `json:"refused"`
	Refills      int    `json:"refills,omitempty"`
	Samples      int    `json:"samples"`
	Trajectories int    `json:"trajectories"`
	StepsStored  int    `json:"steps_stored"`
	// Evaluations counts the evaluations of the model. FlatEvaluations is what as many samples
	// without shared steps would need: more than Evaluations for trees.
	Evaluations     int64 `json:"evaluations"`
	FlatEvaluations int64 `json:"flat_evaluations"`
	// SavedEvaluations is what samples that were ended in the middle did not take, Pruned how many were.
	SavedEvaluations int64 `json:"saved_evaluations,omitempty"`
	Pruned           int   `json:"pruned,omitempty"`
	// Engines counts the samples by what drew them, servers or sampler, if that is more than one.
	Engines map[string]int `json:"engines,omitempty"`
	Digest  string         `json:"digest"`
	Seconds float64        `json:"seconds"`
	// Metrics have verl's names; those of evaluations begin with val-.
	Metrics map[string]float64 `json:"metrics,omitempty"`
	Out     string             `json:"out,omitempty"`
	Sheet   string             `json:"sheet,omitempty"`
	// NoMP4 is why Write made no mp4 beside a video.
	NoMP4 string `json:"no_mp4,omitempty"`
}

// Read returns the outcome of a run so far: all prompts that were accepted, or refused with a uid, sorted by uid;
// those without a result are open. It fails if the server cannot be read.
func Read(ctx context.Context, b *bus.Bus, run schemas.Run) (*Run, error) {
	var prompts []Prompt
	records, err := b.LastMany(ctx, schemas.StreamGroups, []string{schemas.GroupSubject(run, "*")})
	if err != nil {
		return nil, fmt.Errorf("read groups: %w", err)
	}
	for _, m := range records {
		var g schemas.GroupRecord
		if bus.Fits(m, &g) == nil && g.Group.Refill == nil { // a refill replaces one of these
			prompts = append(prompts, Prompt{UID: g.UID, Text: g.Prompt})
		}
	}
	slices.SortFunc(prompts, func(a, b Prompt) int { return cmp.Compare(a.UID, b.UID) })
	o := NewOutcomes(prompts)
	if err := o.Read(ctx, b, run); err != nil {
		return nil, err
	}
	r, err := Collect(ctx, b, run, o)
	if err != nil {
		return nil, err
	}
	status, err := counters.Status(ctx, b, run)
	if err == nil {
		r.Summary.State = status.State
	} else if !errors.Is(err, bus.ErrNotFound) { // a pass over another run has no prompts
		return nil, err
	}
	return r, nil
}

// Collect reads what the run stored for the prompts of o, and computes metrics and digest. The digest covers the
// content of all trajectories and advantages in key order: equal seeds and prompts give an equal digest, however the
// work was packed, timed or repeated. It fails if the server cannot be read.
func Collect(ctx context.Context, b *bus.Bus, run schemas.Run, o *Outcomes) (*Run, error) {
	c := &collection{made: view.Made{}, engines: map[string]int{}}
	trajectories := 0
	for t, err := range view.Trajectories(ctx, b, run, "*") {
		if err != nil {
			return nil, err
		}
		trajectories++
		c.made.Add(t.Trajectory)
	}
	// Count step events of all attempts, without their parts.
	steps := 0
	for _, kind := range []string{schemas.KindStep, schemas.KindTokens} {
		stored, err := b.Subjects(ctx, schemas.StreamSteps, schemas.Address{Kind: kind, Run: run}.Filter())
		if err != nil {
			return nil, err
		}
		steps += len(stored)
	}
	var err error
	if c.rewards, err = view.Rewards(ctx, b, run, "*"); err != nil {
		return nil, err
	}
	r := &Run{Summary: Summary{
		Run: run, Groups: len(o.prompts), Refused: len(o.refused), Refills: len(o.refilled),
		Trajectories: trajectories, StepsStored: steps,
	}}
	for _, p := range o.prompts {
		open := view.GroupResult{UID: p.UID, Prompt: p.Text, Status: outcomes.Open}
		g := &Group{GroupResult: open, Members: []view.Member{}}
		if a := o.Advantage(p.UID); a != nil {
			if err := c.fillGroup(g, a); err != nil {
				return nil, err
			}
			if g.Group != "" { // a substitute has another prompt
				switch record, err := b.Group(ctx, a.Run, a.UID); {
				case err == nil:
					g.Prompt = record.Prompt
				case !errors.Is(err, bus.ErrNotFound):
					return nil, err
				}
			}
		} else if reason, refused := o.Refused(p.UID); refused {
			g.Status, g.Error = schemas.StatusRefused, reason
		}
		r.Groups = append(r.Groups, g)
		r.Summary.Samples += len(g.Members)
		if g.Status == schemas.StatusComplete {
			r.Summary.Complete++
		}
	}
	if r.Summary.State, err = stateOf(ctx, b, r); err != nil {
		return nil, err
	}
	r.Summary.Metrics = c.metricSums.metrics()
	if c.rolls.samples > 0 {
		plans, err := Plans(ctx, b, run)
		if err != nil {
			return nil, err
		}
		for _, p := range plans {
			c.rolls.probability, c.rolls.plans = c.rolls.probability+p.Probability, c.rolls.plans+1
		}
	}
	c.rolls.metrics(r.Summary.Metrics)
	r.Summary.Evaluations, r.Summary.FlatEvaluations = c.evaluations, c.flatEvaluations
	r.Summary.SavedEvaluations, r.Summary.Pruned = c.savedEvaluations, c.pruned
	if len(c.engines) > 1 {
		r.Summary.Engines = c.engines
	}
	r.Summary.Digest = c.digest.String()
	return r, nil
}

// stateOf returns what became of the groups of a run.
func stateOf(ctx context.Context, b *bus.Bus, r *Run) (string, error) {
	h, err := b.ControlsOf(ctx, r.Summary.Run, "")
	if err != nil {
		return "", err
	}
	c := outcomes.Counts{Groups: outcomes.Groups{}}
	for _, g := range r.Groups {
		c.Groups[g.Status]++
	}
	if h.Run != nil {
		c.Control = h.Run.Action
	}
	return c.Run(), nil
}

// collection is what a run stored, and what was gathered from it.
type collection struct {
	made       view.Made
	rewards    map[view.Key]*schemas.Reward
	metricSums metricSums
	rolls      rollSums
	digest     digest
	// evaluations are as in the Summary.
	evaluations, flatEvaluations, savedEvaluations int64
	pruned                                         int
	engines                                        map[string]int
}

// fillGroup sets the result of a group and its members from the group's advantage event, and adds them to digest and
// metrics. A member whose trajectory cannot be read as a rollout has an
// error; fillGroup itself fails only if a content has no digest.
func (c *collection) fillGroup(g *Group, a *schemas.Advantage) error {
	if err := c.digest.add("advantage."+string(a.UID), a); err != nil {
		return err
	}
	g.GroupResult, g.Source = view.GroupResultOf(a, g.UID, g.Prompt), a.SourceRun
	if a.Closed > 0 {
		g.Closed = time.Unix(0, a.Closed).UTC()
	}
	if a.UID != g.UID {
		g.Group = a.UID
	}
	for _, m := range a.Members {
		sample := view.Key{UID: a.UID, Index: m.SampleIndex}
		made, _ := c.made.Of(a.UID, m.SampleIndex)
		reward := c.rewards[sample]
		t := view.Standing(made)
		if reward != nil {
			c.metricSums.addSample(a, &m, reward)
		}
		member := view.MemberOf(&m, t, reward)
		for _, t := range made {
			if err := c.addTrajectory(t); err != nil {
				return err
			}
		}
		c.rolls.add(member.Roll)
		g.Members = append(g.Members, member)
	}
	c.metricSums.addValidation(a, c.rewards)
	return nil
}

// addTrajectory adds a trajectory to digest, evaluations and engines: once, also if it led to several samples.
func (c *collection) addTrajectory(t *schemas.Trajectory) error {
	key := "trajectory." + view.Key{UID: t.UID, Index: t.SampleIndex}.String()
	if t.Stage != schemas.StageMain {
		key += "." + string(t.Stage)
	}
	if _, added := c.digest.contents[key]; added {
		return nil
	}
	if err := c.digest.add(key, t); err != nil {
		return err
	}
	if t.Text != nil && t.Text.SaidBy != "" {
		return nil // no model drew it
	}
	c.countEvaluations(t)
	by := "sampler"
	if d := t.Drawn; d != nil {
		by = d.Engine.String()
	}
	c.engines[by]++
	return nil
}

// countEvaluations adds a sample to the counts of model evaluations: those that it took, those that it would have taken
// if samples of a tree shared no steps and, of one that was ended in the middle, those that it did not take.
func (c *collection) countEvaluations(t *schemas.Trajectory) {
	switch {
	case t.StopReason == schemas.StopPruned && t.Text == nil:
		begin, end := t.Segment()
		at := begin + int64(len(t.Steps))
		c.pruned++
		c.savedEvaluations += sampling.Evaluations(&t.Sampling, at, end)
		taken := sampling.Evaluations(&t.Sampling, begin, at)
		c.evaluations, c.flatEvaluations = c.evaluations+taken, c.flatEvaluations+taken
		return
	case t.StopReason != schemas.StopCompleted:
		return
	}
	if t.Text != nil { // one evaluation for each token
		c.evaluations += t.Text.Generated()
		c.flatEvaluations += t.Text.Generated()
		return
	}
	begin, end := t.Segment()
	own := sampling.Evaluations(&t.Sampling, begin, end)
	if t.Sibling() != nil && t.Group.Tree == nil {
		own = sampling.Evaluations(&t.Sampling, 0, end) // it gave up a beginning of its own
	}
	c.evaluations += own
	c.flatEvaluations += own
	if t.Group.Tree != nil {
		c.flatEvaluations += sampling.Evaluations(&t.Sampling, 0, begin)
	}
}

// Best returns the members by falling reward; members without a reward come last.
func (g *Group) Best() []view.Member {
	members := slices.Clone(g.Members)
	slices.SortStableFunc(members, func(a, b view.Member) int {
		return cmp.Or(view.CompareRewards(a.Reward, b.Reward), cmp.Compare(a.SampleIndex, b.SampleIndex))
	})
	return members
}

// digest covers the content of events, in the order of their keys.
type digest struct{ contents map[string][32]byte }

// add adds an event's content to the digest of a run, under a key that gives it its place. It fails if the event has
// no digest.
func (d *digest) add(key string, e schemas.Event) (err error) {
	if d.contents == nil {
		d.contents = map[string][32]byte{}
	}
	if d.contents[key], err = schemas.ContentDigest(e); err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	return nil
}

// String returns the SHA-256 of all added contents in key order, in hex.
func (d *digest) String() string {
	h := sha256.New()
	for _, key := range slices.Sorted(maps.Keys(d.contents)) {
		content := d.contents[key]
		fmt.Fprintf(h, "%s\x00", key)
		h.Write(content[:])
	}
	return hex.EncodeToString(h.Sum(nil))
}

// Prompt is a prompt whose outcome is wanted.
type Prompt struct {
	UID  schemas.UID
	Text string
}

// Outcomes follows what becomes of the prompts of a run. A group may be given up and replaced by a fresh one; the
// outcome is that of the last.
type Outcomes struct {
	prompts    []Prompt
	advantages map[schemas.UID]*schemas.Advantage // by the uid of the prompt
	refused    map[schemas.UID]string             // reasons
	refilled   map[schemas.UID]bool               // uids of groups that a fresh one replaces
	open       map[schemas.UID]bool
}

// NewOutcomes returns Outcomes in which every prompt is still open, that is, without a result. The uids of the
// prompts must differ.
func NewOutcomes(prompts []Prompt) *Outcomes {
	o := &Outcomes{
		prompts: prompts, advantages: map[schemas.UID]*schemas.Advantage{}, refused: map[schemas.UID]string{},
		refilled: map[schemas.UID]bool{}, open: map[schemas.UID]bool{},
	}
	for _, p := range prompts {
		o.open[p.UID] = true
	}
	return o
}

// Read adds every stored advantage of the run, before new ones are followed with Add. It fails if the server cannot
// be read.
func (o *Outcomes) Read(ctx context.Context, b *bus.Bus, run schemas.Run) error {
	stored, err := b.LastMany(ctx, schemas.StreamAdvantages, []string{schemas.AdvantageSubject(run, "*")})
	if err != nil {
		return fmt.Errorf("read stored advantages: %w", err)
	}
	for _, m := range stored {
		o.Add(m)
	}
	return nil
}

// Add notes an advantage event, which closes the group of a prompt, or says that a fresh group replaces it. An event
// that is not valid, not of these prompts, or not new changes nothing.
func (o *Outcomes) Add(m *bus.Message) {
	var a schemas.Advantage
	if bus.Fits(m, &a) != nil {
		return // not a result; the true one will replace it
	}
	uid := a.UID
	if a.Refill != nil {
		uid = a.Refill.Root
	}
	switch {
	case !o.open[uid]:
	case a.RefilledBy != "": // a fresh group is on its way
		o.refilled[a.UID] = true
	case a.Status == schemas.StatusRefused:
		o.Refuse(uid, a.Error)
	default:
		o.advantages[uid] = &a
		delete(o.open, uid)
	}
}

// Refuse notes that a prompt was refused; it changes nothing if the prompt has an outcome.
func (o *Outcomes) Refuse(uid schemas.UID, reason string) {
	if o.open[uid] {
		o.refused[uid] = reason
		delete(o.open, uid)
	}
}

// Open reports whether a prompt has no outcome yet.
func (o *Outcomes) Open(uid schemas.UID) bool { return o.open[uid] }

// Left returns how many prompts have no outcome yet.
func (o *Outcomes) Left() int { return len(o.open) }

// Refills returns how many groups were given up for fresh ones.
func (o *Outcomes) Refills() int { return len(o.refilled) }

// Advantage returns the result of a prompt's group, or of the last group that replaced it; nil if there is none.
func (o *Outcomes) Advantage(uid schemas.UID) *schemas.Advantage { return o.advantages[uid] }

// Refused reports whether a prompt was refused, and why.
func (o *Outcomes) Refused(uid schemas.UID) (reason string, refused bool) {
	reason, refused = o.refused[uid]
	return reason, refused
}
