package view

import (
	"time"

	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/schemas"
)

// rateSeconds is over how many seconds rates are.
const rateSeconds = 30

// rate counts events of the last seconds.
type rate struct {
	at    [rateSeconds]int64 // Unix seconds
	count [rateSeconds]int
}

// add counts an event.
func (r *rate) add(at time.Time) {
	second := at.Unix()
	i := second % rateSeconds
	if r.at[i] != second {
		if r.at[i] > second {
			return
		}
		r.at[i], r.count[i] = second, 0
	}
	r.count[i]++
}

// perSecond returns the mean rate of the last seconds, the present one aside.
func (r *rate) perSecond(now time.Time) float64 {
	n := 0
	for i, second := range r.at {
		if age := now.Unix() - second; age > 0 && age < rateSeconds {
			n += r.count[i]
		}
	}
	return float64(n) / (rateSeconds - 1)
}

// Stage is one stage of a run: how much it has done, of how much, and how fast.
type Stage struct {
	Name string `json:"name"`
	// Counts names what is counted.
	Counts string `json:"counts"`
	Done   int64  `json:"done"`
	// Lost have ended without.
	Lost int64 `json:"lost"`
	Of   int64 `json:"of"`
	// PerMinute is the mean of the last half minute.
	PerMinute float64 `json:"per_minute"`
}

// Progress is what a page shows of a run above its groups.
type Progress struct {
	Run      schemas.Run    `json:"run"`
	Epoch    string         `json:"epoch"`
	Revision uint64         `json:"revision"`
	State    string         `json:"state"`          // the outcome of the run
	Held     string         `json:"held,omitempty"` // what holds it up, in a few words
	Stages   []Stage        `json:"stages"`
	StepsPer float64        `json:"steps_per_minute"`
	Statuses map[string]int `json:"statuses"`
	// Waits says in words what the run waits for.
	Waits []outcomes.Wait `json:"waits"`
	Fault string          `json:"fault,omitempty"`
	// LeftOut is how many older groups are not in the list.
	LeftOut int `json:"left_out,omitempty"`
	// Mean is that of the groups' mean rewards, over the last 50 that have one.
	Mean *float64 `json:"mean_reward"`

	// Updates is how many updates trainers have told.
	Updates int `json:"updates,omitempty"`
	// Judged is how many samples wait for a verdict.
	Judged int64 `json:"judged,omitempty"`

	lanes map[schemas.Lane]int // open groups
	// refusal is the reason of the newest refused prompt, refusedUID its uid.
	refusal    string
	refusedUID schemas.UID
	// failure is the reason of the newest failed group, failedUID its uid.
	failure   string
	failedUID schemas.UID
	// unmade, unscored and unclosed count open samples and groups by what they lack.
	unmade, unscored, unclosed int64
}

// tally counts what is stored of the run; f.mu is held.
func (f *follower) tally() *Progress {
	now := time.Now()
	p := &Progress{
		Run: f.run, Epoch: f.epoch, Revision: f.revision, Statuses: map[string]int{}, Fault: f.fault,
		LeftOut: f.leftOut, Updates: f.toldUpdates,
		lanes: map[schemas.Lane]int{}, Waits: append([]outcomes.Wait{}, f.alarms...),
	}
	perMinute := func(kind string) float64 {
		if r := f.rates[kind]; r != nil {
			return 60 * r.perSecond(now)
		}
		return 0
	}
	var samples int64
	var intake, sampler, reward, advantage Stage
	var means []float64
	for _, r := range f.order {
		p.Statuses[r.Status]++
		switch r.Status {
		case schemas.StatusRefused:
			p.refusal, p.refusedUID = r.Error, r.UID
		case schemas.StatusFailed:
			p.failure, p.failedUID = r.Error, r.UID
		}
		samples += r.Size
		sampler.Done += int64(r.Made)
		reward.Done += int64(r.Scored)
		reward.Lost += int64(r.Lost)
		if r.Status == schemas.StatusRefused {
			intake.Lost++
		}
		if r.Mean != nil {
			means = append(means, *r.Mean)
		}
		if r.Status != outcomes.Open {
			sampler.Lost += max(0, r.Size-int64(r.Made))
			if outcomes.HasAdvantages(r.Status) {
				advantage.Done++
			} else {
				advantage.Lost++
			}
			continue
		}
		sampler.Lost += int64(r.ended - r.Made)
		p.lanes[r.lane]++
		p.unmade += max(0, r.Size-int64(r.ended))
		unscored := max(0, int64(r.ended-r.Scored-r.Lost))
		p.unscored += unscored
		if int64(r.Scored+r.Lost) >= r.Size {
			p.unclosed++
		}
		if r.verdicts {
			p.Judged += unscored
		}
	}
	if recent := means[max(0, len(means)-50):]; len(recent) > 0 {
		sum := 0.0
		for _, m := range recent {
			sum += m
		}
		p.Mean = new(sum / float64(len(recent)))
	}
	groups := int64(len(f.order))
	intake.Done = groups - intake.Lost
	p.Stages = []Stage{
		{"intake", "groups", intake.Done, intake.Lost, groups, perMinute("groups")},
		{"sampler", "samples", sampler.Done, sampler.Lost, samples, perMinute("trajectories")},
		{"reward", "samples", reward.Done, reward.Lost, samples, perMinute("rewards")},
		{"advantage", "groups", advantage.Done, advantage.Lost, groups, perMinute("advantages")},
	}
	p.StepsPer = perMinute("steps")
	return p
}
