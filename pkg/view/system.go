package view

import (
	"context"
	"encoding/json"
	"slices"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/schemas"
)

// System is what runs, with which weights, and how full the streams are.
type System struct {
	Present []presence        `json:"present"`
	Lanes   []*lane           `json:"lanes"`
	Streams []bus.StreamStats `json:"streams"`
	Waits   []outcomes.Wait   `json:"waits"`
	// Dead is how many dead letters are stored.
	Dead uint64 `json:"dead"`
	// Mirror: the account has copies of the streams, and does not see what waits for services and samplers.
	Mirror bool `json:"mirror,omitempty"`

	// waiting counts by service the messages that no process asks for, backlog by lane the requests.
	waiting map[string]uint64
	// unanswered counts prompts that intake has not answered.
	unanswered uint64
	backlog    map[schemas.Lane]uint64
}

// presence is a service that runs. Its JSON has the keys of the contract, without the samples in hand.
type presence struct{ *schemas.Presence }

// MarshalJSON implements json.Marshaler.
func (p presence) MarshalJSON() ([]byte, error) {
	short := *p.Presence
	short.Making = nil
	return json.Marshal(schemas.JSON(&short))
}

// lane is a queue of requests, and the weights of a tenant; of main first.
type lane struct {
	Lane    schemas.Lane   `json:"lane"`
	Tenant  schemas.Tenant `json:"tenant,omitempty"` // empty: main
	Current *policyLine    `json:"current"`
	Served  int64          `json:"served_version"`
	// Samplers counts those that serve the lane, Backlog the requests that are not done.
	Samplers int    `json:"samplers"`
	Backlog  uint64 `json:"backlog"`
	Text     bool   `json:"text"`
}

// policyLine is one version of the weights of a lane.
type policyLine struct {
	Version   int64  `json:"version"`
	Model     string `json:"model"`
	Family    string `json:"family,omitempty"`
	Weights   string `json:"weights_digest"`
	Kind      string `json:"kind"` // checkpoint, adapter or transformer
	Rule      string `json:"rule,omitempty"`
	Rollback  *int64 `json:"rollback,omitempty"`
	By        string `json:"by,omitempty"`
	Note      string `json:"note,omitempty"`
	Announced int64  `json:"announced"` // Unix milliseconds
	Refused   string `json:"refused,omitempty"`
}

// policyLineOf returns a version of the weights as pages get it.
func policyLineOf(p *schemas.Policy) *policyLine {
	kind := "checkpoint"
	switch {
	case p.Adapter != nil:
		kind = "adapter"
	case len(p.Weights) > 0:
		kind = "transformer"
	}
	return &policyLine{
		Version: p.PolicyVersion, Model: p.Model, Family: p.Family, Weights: p.WeightsDigest, Kind: kind, Rule: p.Rule,
		Rollback: p.Rollback, By: p.By, Note: p.Note, Announced: p.Announced / int64(time.Millisecond),
	}
}

func (x *System) serves(name schemas.Lane) bool {
	return slices.ContainsFunc(
		x.Present,
		func(p presence) bool { return p.Service == schemas.ServiceSampler && p.Lane == name },
	)
}

// lanesOf returns a lane, if it is known.
func (x *System) lanesOf(name schemas.Lane) []*lane {
	i := slices.IndexFunc(x.Lanes, func(l *lane) bool { return l.Lane == name })
	if i < 0 {
		return nil
	}
	return x.Lanes[i : i+1]
}

// countConsumers notes the prompts that wait; requests gets the consumers of the lanes by name. An
// account of copies has no consumers of services.
func (x *System) countConsumers(st *bus.StreamStats, requests map[string]bus.ConsumerStats) {
	for _, c := range st.Consumers {
		if st.Name == schemas.StreamRequests {
			requests[c.Name] = c
		}
		if c.Takes && c.Stage == schemas.ServiceIntake && st.Name == schemas.StreamPrompts {
			x.unanswered += c.Pending + uint64(max(0, c.AckPending))
		}
	}
}

// readSystem reads what runs and how full the streams are.
func (r *Reader) readSystem(ctx context.Context) (*System, error) {
	x := &System{
		Present: []presence{}, Lanes: []*lane{}, Streams: []bus.StreamStats{},
		backlog: map[schemas.Lane]uint64{},
	}
	running, err := r.bus.Present(ctx)
	if err != nil {
		return nil, err
	}
	for _, p := range running {
		x.Present = append(x.Present, presence{p})
	}
	policies, err := r.bus.Policies(ctx)
	if err != nil {
		return nil, err
	}
	stats, err := r.bus.Stats(ctx)
	if err != nil {
		return nil, err
	}
	x.Mirror = slices.ContainsFunc(stats, func(st bus.StreamStats) bool { return st.Mirror })
	if !x.Mirror {
		x.waiting = bus.UnservedBacklog(stats)
	}
	requests := map[string]bus.ConsumerStats{}
	for _, st := range stats {
		if st.Name == schemas.StreamDead {
			x.Dead = st.Messages
		}
		x.countConsumers(&st, requests)
		if st.Consumers == nil {
			st.Consumers = []bus.ConsumerStats{}
		}
		x.Streams = append(x.Streams, st)
	}
	for _, p := range policies {
		l := &lane{
			Lane: p.Lane, Current: policyLineOf(p), Served: bus.ServedVersion(p, running), Text: p.Text != nil,
		}
		if p.Tenant != schemas.TenantMain {
			l.Tenant = p.Tenant
		}
		for _, on := range x.Present {
			if on.Service == schemas.ServiceSampler && on.Lane == p.Lane {
				l.Samplers++
			}
		}
		c := requests[schemas.RequestsDurable(p.Lane).Name]
		l.Backlog = c.Pending + uint64(max(0, c.AckPending))
		x.backlog[p.Lane] = l.Backlog
		x.Lanes = append(x.Lanes, l)
	}
	x.Waits = r.systemWaits(x, r.bus.FaultsOf(stats))
	return x, nil
}

// Lane is the history of a lane's weights, the newest versions first.
type Lane struct {
	Versions []*policyLine `json:"versions"`
	Total    int           `json:"total"`
}

// Lane returns the versions of the weights of a tenant of a lane, at most most.
func (r *Reader) Lane(ctx context.Context, of schemas.Lineage, most int) (*Lane, error) {
	history, err := r.client.PolicyHistory(ctx, of)
	if err != nil {
		return nil, err
	}
	refused, err := r.client.PolicyRefusals(ctx, of)
	if err != nil {
		return nil, err
	}
	out := &Lane{Versions: []*policyLine{}, Total: len(history)}
	for _, p := range slices.Backward(history[max(0, len(history)-most):]) {
		line := policyLineOf(p)
		line.Refused = refused[p.PolicyVersion]
		out.Versions = append(out.Versions, line)
	}
	return out, nil
}
