package view

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/schemas"
)

// Updates are what trainers told of the updates that they made of a run, as curves.
type Updates struct {
	Trainers []*Trainer `json:"trainers"`
	// Numbers are the names of all curves, in the order in which they are shown.
	Numbers []string `json:"numbers"`
}

// Trainer is one trainer, with the weights that it trains.
type Trainer struct {
	Trainer string         `json:"trainer"`
	Lane    schemas.Lane   `json:"lane"`
	Tenant  schemas.Tenant `json:"tenant"`
	// Count is how many updates it told, LeftOut how many older ones are not in the curves.
	Count   int `json:"count"`
	LeftOut int `json:"left_out,omitempty"`
	// Steps has the last update of each point, Curves the mean of each number there; null: it has none.
	Steps  []int64               `json:"steps"`
	Curves map[string][]*float64 `json:"curves"`
	// PolicyVersion and At are those of the newest update; At is in Unix milliseconds.
	PolicyVersion int64 `json:"policy_version"`
	At            int64 `json:"at"`

	updates []*schemas.Update
}

// takeUpdate takes an update of a trainer. An event that is not valid changes nothing, and neither does step 0, which
// says that a trainer begins.
func (f *follower) takeUpdate(m *bus.Message) {
	e := &schemas.Update{}
	if bus.Fits(m, e) != nil || e.Step == 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.updates = append(f.updates, e)
	if f.toldUpdates++; len(f.updates) > MaxRows {
		f.updates = f.updates[1:]
	}
	f.wake()
}

// takeAlarm takes an alarm, which is shown with what the run waits for. An event that is not valid changes nothing.
func (f *follower) takeAlarm(m *bus.Message) {
	e := &schemas.Alarm{}
	if bus.Fits(m, e) != nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	says := fmt.Sprintf("rule %s, at %s: %s", e.Rule, time.Unix(0, e.At).UTC().Format(time.RFC3339), e.Says)
	f.alarms = append(f.alarms, outcomes.Wait{Rule: e.Rule, Says: says, Fix: schemas.RuleNamed(e.Rule).Fix})
	f.wake()
}

// Updates returns the updates that trainers told of a run, each trainer's in at most most points.
func (r *Reader) Updates(ctx context.Context, run schemas.Run, most int) (*Updates, error) {
	f, err := r.follow(ctx, run, nil)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	u, by := &Updates{Trainers: []*Trainer{}, Numbers: []string{}}, map[string]*Trainer{}
	for _, e := range f.updates {
		key := string(e.Lane) + "." + string(e.Tenant) + "." + e.Trainer
		t := by[key]
		if t == nil {
			t = &Trainer{Trainer: e.Trainer, Lane: e.Lane, Tenant: e.Tenant, Curves: map[string][]*float64{}}
			by[key], u.Trainers = t, append(u.Trainers, t)
		}
		t.updates = append(t.updates, e)
	}
	places := map[string]int{}
	for _, t := range u.Trainers {
		slices.SortFunc(t.updates, func(a, b *schemas.Update) int { return cmp.Compare(a.Step, b.Step) })
		last := t.updates[len(t.updates)-1]
		t.Count, t.PolicyVersion, t.At = len(t.updates), last.PolicyVersion, last.At/1e6
		t.draw(most, places)
	}
	if len(u.Trainers) == 1 {
		u.Trainers[0].LeftOut = f.toldUpdates - len(f.updates)
	}
	for name := range places {
		u.Numbers = append(u.Numbers, name)
	}
	slices.SortFunc(u.Numbers, func(a, b string) int { return cmp.Or(places[a]-places[b], strings.Compare(a, b)) })
	return u, nil
}

// draw makes the curves of the updates, and notes the place that each number has among those of its update.
func (t *Trainer) draw(most int, places map[string]int) {
	for part := range slices.Chunk(t.updates, max(1, (len(t.updates)+most-1)/most)) {
		sums, counts := map[string]float64{}, map[string]float64{}
		for _, e := range part {
			for i, m := range e.Numbers() {
				sums[m.Name] += m.Value
				counts[m.Name]++
				places[m.Name] = max(places[m.Name], i)
			}
		}
		at := len(t.Steps)
		t.Steps = append(t.Steps, part[len(part)-1].Step)
		for name, sum := range sums {
			for len(t.Curves[name]) < at {
				t.Curves[name] = append(t.Curves[name], nil)
			}
			if mean := sum / counts[name]; !math.IsInf(mean, 0) {
				t.Curves[name] = append(t.Curves[name], &mean)
			}
		}
	}
	for name, curve := range t.Curves {
		for len(curve) < len(t.Steps) {
			curve = append(curve, nil)
		}
		t.Curves[name] = curve
	}
}
