package view

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/schemas"
)

// GroupRow is one group in the list of a run.
type GroupRow struct {
	// Number counts the groups of the run in the order in which they opened, from 1.
	Number int         `json:"number"`
	UID    schemas.UID `json:"uid"`
	Prompt string      `json:"prompt"`
	Batch  string      `json:"batch,omitempty"`
	Size   int64       `json:"size"`
	// Status is the outcome, as package outcomes says it.
	Status string `json:"status"`
	Error  string `json:"error,omitempty"`
	// Made samples were completed, Scored ones have a reward, Lost ones have ended without what they lack.
	Made       int      `json:"made"`
	Scored     int      `json:"scored"`
	Lost       int      `json:"lost,omitempty"`
	Mean       *float64 `json:"mean"`
	Std        *float64 `json:"std"`
	Least      *float64 `json:"min"`
	Most       *float64 `json:"max"`
	Opened     int64    `json:"opened"` // Unix milliseconds
	Closed     int64    `json:"closed,omitempty"`
	Source     string   `json:"data_source,omitempty"`
	Validation bool     `json:"validation,omitempty"`
	RefilledBy string   `json:"refilled_by,omitempty"`

	lane     schemas.Lane
	verdicts bool
	revision uint64
	// samples are those of which something is stored, nil once all are made and the group is closed; ended counts
	// those that were made, or will not be.
	samples map[int64]*sampleEvents
	ended   int
}

// sampleEvents are the outcomes that the events of one sample say; "": there is no such event.
type sampleEvents struct{ stop, reward string }

// sample returns the outcomes of a sample by its index.
func (r *GroupRow) sample(index int64) *sampleEvents {
	if r.samples == nil {
		r.samples = map[int64]*sampleEvents{}
	}
	s := r.samples[index]
	if s == nil {
		s = &sampleEvents{}
		r.samples[index] = s
	}
	return s
}

// countSamples counts the samples by what became of them. The result of a closed group says that of each; events that
// come later say whether it was made.
func (r *GroupRow) countSamples() {
	open := r.Status == outcomes.Open
	if r.Made, r.ended = 0, 0; open {
		r.Scored, r.Lost = 0, 0
	}
	for _, s := range r.samples {
		if s.stop != "" || s.reward == schemas.StatusFailed { // or a next stage could not be asked for
			r.ended++
		}
		if s.stop == schemas.StopCompleted {
			r.Made++
		}
		if open {
			r.countSample(outcomes.Sample("", s.stop, s.reward))
		}
	}
	if !open && int64(r.Made) >= r.Size {
		r.samples = nil
	}
}

// countSample counts one sample with its outcome.
func (r *GroupRow) countSample(outcome string) {
	switch outcome {
	case schemas.StatusScored:
		r.Scored++
	case outcomes.Made, outcomes.Awaited:
	default:
		r.Lost++
	}
}

// takeRecord takes the record of a group, which opens it. An event that is not valid changes nothing: services remove
// it.
func (f *follower) takeRecord(m *bus.Message) {
	var g schemas.GroupRecord
	if bus.Fits(m, &g) != nil {
		return
	}
	f.count("groups", m.Time)
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.rowOf(g.UID)
	r.Prompt, r.Size, r.Opened, r.lane = cut(g.Prompt, maxCut), g.GroupSize, m.Time.UnixMilli(), g.Lane
	r.Validation, r.verdicts = g.Group.Validation, len(VerdictNames(&g.Group)) > 0
	if g.Group.Batch != string(g.UID) {
		r.Batch = g.Group.Batch
	}
	if fields, err := g.Group.Metadata.Map(); err == nil {
		if text, ok := fields["data_source"].(string); ok {
			r.Source = cut(text, maxCut)
		}
	}
	f.touch(r)
}

// takeTrajectory takes the end of a sample.
func (f *follower) takeTrajectory(m *bus.Message, outcome string) {
	f.takeSamples(m, m.Ends(), "trajectories", func(s *sampleEvents) { s.stop = outcome })
}

// takeReward takes the reward of a sample, or that it has none.
func (f *follower) takeReward(m *bus.Message, outcome string) {
	f.takeSamples(m, 1, "rewards", func(s *sampleEvents) { s.reward = outcome })
}

// takeSamples takes the outcome that an event says of n samples from its own on: under rate, and in the row of its
// group.
func (f *follower) takeSamples(m *bus.Message, n int64, rate string, set func(*sampleEvents)) {
	a, _ := schemas.ParseSubject(m.Subject)
	first, _ := strconv.ParseInt(a.Sample, 10, 64)
	for range n {
		f.count(rate, m.Time)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.rowOf(a.UID)
	if r.Status != outcomes.Open && r.samples == nil {
		return // all are made, and the result says the rest
	}
	for i := range n {
		set(r.sample(first + i))
	}
	r.countSamples()
	f.touch(r)
}

// takeAdvantage takes the result of a group, which closes it. An event that is not valid changes nothing: services
// remove it.
func (f *follower) takeAdvantage(m *bus.Message) {
	var a schemas.Advantage
	if bus.Fits(m, &a) != nil {
		return
	}
	f.count("advantages", m.Time)
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.rowOf(a.UID)
	r.Status, r.Error, r.Mean, r.Std = outcomes.Group(&a), cut(a.Error, 2*maxCut), a.Mean, a.Std
	r.Size, r.Closed, r.Validation = a.GroupSize, m.Time.UnixMilli(), a.Validation
	r.RefilledBy = string(a.RefilledBy)
	if r.Opened == 0 { // of a pass over another run there may be no record
		r.Opened = m.Time.UnixMilli()
	}
	r.Least, r.Most, r.Scored, r.Lost = nil, nil, 0, 0
	for i := range a.Members {
		outcome := outcomes.Sample(a.Members[i].Status, "", "")
		if r.countSample(outcome); outcome == schemas.StatusScored {
			r.sample(a.Members[i].SampleIndex).stop = schemas.StopCompleted
		}
		x := a.Members[i].Reward
		if x == nil {
			continue
		}
		if r.Least == nil || *x < *r.Least {
			r.Least = new(*x)
		}
		if r.Most == nil || *x > *r.Most {
			r.Most = new(*x)
		}
	}
	r.countSamples()
	f.touch(r)
}

// Orders are the orders of the groups of a run.
var Orders = []string{"newest", "oldest", "best", "worst", "spread"}

// List says which groups of a run are wanted: one of Orders, those of an outcome, those with a text in prompt or uid.
type List struct {
	Order, Status, Text string
	Offset, Limit       int
}

// Groups is a page of the groups of a run.
type Groups struct {
	Rows  []GroupRow `json:"rows"`
	Total int        `json:"total"`
	// All is how many groups the run has, whatever was asked for.
	All      int    `json:"all"`
	Epoch    string `json:"epoch"`
	Revision uint64 `json:"revision"`
	LeftOut  int    `json:"left_out,omitempty"`
}

// Groups returns groups of a run.
func (r *Reader) Groups(ctx context.Context, run schemas.Run, l List) (*Groups, error) {
	f, err := r.follow(ctx, run, nil)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	rows, total := f.rowsOf(l)
	return &Groups{rows, total, len(f.order), f.epoch, f.revision, f.leftOut}, nil
}

// rowsOf returns copies of the rows that are wanted, and how many there are in all; f.mu is held.
func (f *follower) rowsOf(l List) (rows []GroupRow, total int) {
	text := strings.ToLower(l.Text)
	var match []*GroupRow
	for _, r := range slices.Backward(f.order) {
		if l.Status != "" && r.Status != l.Status {
			continue
		}
		if text != "" && !strings.Contains(strings.ToLower(r.Prompt), text) &&
			!strings.Contains(strings.ToLower(string(r.UID)), text) {
			continue
		}
		match = append(match, r)
	}
	switch l.Order {
	case "oldest":
		slices.Reverse(match)
	case "best":
		sortFalling(match, 1, func(r *GroupRow) *float64 { return r.Mean })
	case "worst":
		sortFalling(match, -1, func(r *GroupRow) *float64 { return r.Mean })
	case "spread":
		sortFalling(match, 1, func(r *GroupRow) *float64 { return r.Std })
	}
	total = len(match)
	rows = []GroupRow{}
	for _, r := range match[min(l.Offset, total):min(l.Offset+l.Limit, total)] {
		rows = append(rows, *r)
	}
	return rows, total
}

// sortFalling sorts rows by a value, times sign, that falls; rows without one come last.
func sortFalling(rows []*GroupRow, sign float64, value func(*GroupRow) *float64) {
	scaled := func(r *GroupRow) *float64 {
		if v := value(r); v != nil {
			return new(sign * *v)
		}
		return nil
	}
	slices.SortStableFunc(rows, func(a, b *GroupRow) int { return CompareRewards(scaled(a), scaled(b)) })
}

// Curve is the rewards of a run over time.
type Curve struct {
	Points  []point  `json:"points"`
	Sources []string `json:"data_sources"`
}

// point is one place of a curve: groups that closed one after the other.
type point struct {
	At     int64   `json:"at"` // Unix milliseconds, of the last group
	Number int     `json:"number"`
	Groups int     `json:"groups"`
	Mean   float64 `json:"mean"`
	Least  float64 `json:"min"`
	Most   float64 `json:"max"`
	Std    float64 `json:"std"`
	// Sources has the mean of each listed data source that closed a group here.
	Sources map[string]float64 `json:"sources,omitempty"`
}

// maxSources is how many data sources a curve lists.
const maxSources = 100

// Curve returns the rewards of a run's groups in the order in which they closed, in at most most points: of one data
// source, or of all. It names the data sources.
func (r *Reader) Curve(ctx context.Context, run schemas.Run, source string, most int) (*Curve, error) {
	f, err := r.follow(ctx, run, nil)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	c := &Curve{Points: []point{}}
	var closed []*GroupRow
	seen := map[string]bool{}
	for _, r := range f.order {
		if r.Mean == nil {
			continue
		}
		if r.Source != "" && !seen[r.Source] && len(seen) < maxSources {
			seen[r.Source] = true
			c.Sources = append(c.Sources, r.Source)
		}
		if source == "" || r.Source == source {
			closed = append(closed, r)
		}
	}
	slices.SortStableFunc(closed, func(a, b *GroupRow) int { return cmp.Compare(a.Closed, b.Closed) })
	slices.Sort(c.Sources)
	each := max(1, (len(closed)+most-1)/most)
	for i := 0; i < len(closed); i += each {
		part := closed[i:min(i+each, len(closed))]
		p := point{
			At:     part[len(part)-1].Closed,
			Number: i + len(part),
			Groups: len(part),
			Least:  *part[0].Mean,
			Most:   *part[0].Mean,
		}
		p.Sources = meansBySource(part, seen)
		for _, r := range part {
			p.Mean += *r.Mean / float64(len(part))
			if r.Std != nil {
				p.Std += *r.Std / float64(len(part))
			}
			if r.Least != nil {
				p.Least = min(p.Least, *r.Least)
			}
			if r.Most != nil {
				p.Most = max(p.Most, *r.Most)
			}
		}
		c.Points = append(c.Points, p)
	}
	return c, nil
}

// meansBySource returns the mean reward of those of named data sources that rows have; nil: they have none.
func meansBySource(rows []*GroupRow, named map[string]bool) map[string]float64 {
	var sums map[string]float64
	counts := map[string]float64{}
	for _, r := range rows {
		if !named[r.Source] {
			continue
		}
		if sums == nil {
			sums = map[string]float64{}
		}
		sums[r.Source] += *r.Mean
		counts[r.Source]++
	}
	for name := range sums {
		sums[name] /= counts[name]
	}
	return sums
}

// cut shortens a text to a number of bytes, at the end of a character.
func cut(text string, most int) string {
	if len(text) <= most {
		return text
	}
	for most > 0 && !utf8.RuneStart(text[most]) {
		most--
	}
	return text[:most] + "…"
}
