package ui

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/schemas"
)

// System is what runs, with which weights, and how full the streams are.
type System struct {
	Present []*presence       `json:"present"`
	Lanes   []*lane           `json:"lanes"`
	Streams []bus.StreamStats `json:"streams"`
	Waits   []outcomes.Wait   `json:"waits"`
	// Dead is how many dead letters are stored.
	Dead uint64 `json:"dead"`
	// Mirror: the account has copies of the streams, and does not see what waits for services and samplers.
	Mirror bool `json:"mirror,omitempty"`

	// waiting counts by service the messages that no process asks for, backlog by lane the requests.
	waiting map[string]uint64
	// unanswered counts prompts that intake has not answered; facts are what holds runs up.
	unanswered uint64
	facts      outcomes.Facts
	backlog    map[schemas.Lane]uint64
}

// presence is a sampler or a reward service that runs.
type presence struct {
	Service  string       `json:"service"`
	Instance string       `json:"instance"`
	Lane     schemas.Lane `json:"lane,omitempty"`
	Reward   []string     `json:"reward,omitempty"`
	Missing  []missing    `json:"missing,omitempty"`
	Version  *int64       `json:"policy_version,omitempty"`
	Weights  string       `json:"weights_digest,omitempty"`
	Loading  *int64       `json:"loading,omitempty"`
	Draining bool         `json:"draining,omitempty"`
	// Starting is why a sampler that has started serves its lane not yet.
	Starting string `json:"starting,omitempty"`
	// Waiting samples need space in MDR_STEPS, or on the disk; Held bytes are reserved.
	Waiting int64 `json:"waiting,omitempty"`
	Held    int64 `json:"held_bytes,omitempty"`
	Disk    bool  `json:"disk,omitempty"`
	At      int64 `json:"at"` // Unix milliseconds
	// Samples were in the newest micro-batch, of Places; it took StepMS and ended EvaluatedAt, Unix milliseconds.
	Samples     int64   `json:"batch_samples,omitempty"`
	Places      int64   `json:"batch_places,omitempty"`
	StepMS      float64 `json:"step_ms,omitempty"`
	EvaluatedAt int64   `json:"evaluated_at,omitempty"`
	// Backend is what it computes on.
	Backend string `json:"backend,omitempty"`
}

// missing is a reward function that cannot be had, and why.
type missing struct {
	Name   string `json:"name"`
	Reason string `json:"reason"`
}

// lane is a queue of requests, and its weights.
type lane struct {
	Lane    schemas.Lane `json:"lane"`
	Current *policyLine  `json:"current"`
	Served  int64        `json:"served_version"`
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

// serves reports whether a sampler serves a lane.
func (x *System) serves(name schemas.Lane) bool {
	return slices.ContainsFunc(
		x.Present,
		func(p *presence) bool { return p.Service == schemas.ServiceSampler && p.Lane == name },
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
func (s *server) readSystem(ctx context.Context) (*System, error) {
	x := &System{
		Present: []*presence{}, Lanes: []*lane{}, Streams: []bus.StreamStats{},
		backlog: map[schemas.Lane]uint64{},
	}
	running, err := s.bus.Present(ctx)
	if err != nil {
		return nil, err
	}
	for _, p := range running {
		x.Present = append(x.Present, presenceOf(p))
	}
	policies, err := s.bus.Policies(ctx)
	if err != nil {
		return nil, err
	}
	stats, err := s.bus.Stats(ctx)
	if err != nil {
		return nil, err
	}
	faults, err := s.bus.Faults(ctx)
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
	x.Waits = systemWaits(x, faults)
	return x, nil
}

// presenceOf returns a service that runs as pages get it.
func presenceOf(p *schemas.Presence) *presence {
	out := &presence{
		Service: p.Service, Instance: p.Instance, Lane: p.Lane, Reward: p.Reward, Version: p.PolicyVersion,
		Weights: p.WeightsDigest, Loading: p.Loading, Draining: p.Draining, Starting: p.Waiting, Backend: p.Backend,
		At: p.At / int64(time.Millisecond),
	}
	for _, m := range p.Missing {
		out.Missing = append(out.Missing, missing{m.Name, m.Reason})
	}
	if e := p.Evaluation; e != nil {
		out.Samples, out.Places, out.StepMS = e.Samples, e.Places, float64(e.TookNS)/float64(time.Millisecond)
		out.EvaluatedAt = e.At / int64(time.Millisecond)
	}
	if p.Room != nil {
		out.Waiting, out.Held, out.Disk = p.Room.Waiting, p.Room.Held, p.Room.Disk
	}
	return out
}

func (s *server) answerSystem(r *http.Request) (any, error) { return s.system.get(r.Context()) }

// answerLane answers with the versions of a lane, the newest first.
func (s *server) answerLane(r *http.Request) (any, error) {
	name := schemas.Lane(r.PathValue("lane"))
	if err := schemas.CheckToken("lane", name); err != nil {
		return nil, &requestError{http.StatusBadRequest, err.Error()}
	}
	history, err := s.client.PolicyHistory(r.Context(), name)
	if err != nil {
		return nil, err
	}
	refused, err := s.client.PolicyRefusals(r.Context(), name)
	if err != nil {
		return nil, err
	}
	lines := []*policyLine{}
	for _, p := range slices.Backward(history[max(0, len(history)-maxPage):]) {
		line := policyLineOf(p)
		line.Refused = refused[p.PolicyVersion]
		lines = append(lines, line)
	}
	return map[string]any{"versions": lines, "total": len(history)}, nil
}

// letter is a dead letter.
type letter struct {
	ID         uint64      `json:"id"`
	At         int64       `json:"at"` // Unix milliseconds
	Stage      string      `json:"stage"`
	Code       string      `json:"code"`
	Reason     string      `json:"reason"`
	Run        schemas.Run `json:"run,omitempty"`
	UID        schemas.UID `json:"uid,omitempty"`
	Subject    string      `json:"subject,omitempty"`
	Stream     string      `json:"stream,omitempty"`
	Deliveries uint64      `json:"deliveries,omitempty"`
	// Original is what was refused, as far as it can be read.
	Original json.RawMessage `json:"original,omitempty"`
	Bytes    int             `json:"bytes,omitempty"`
}

// letterOf returns a dead letter; one that cannot be read says so.
func letterOf(m *bus.Message) (*letter, *schemas.Dead) {
	l := &letter{ID: m.Seq, At: milliseconds(m.Time)}
	d := &schemas.Dead{}
	if err := schemas.Decode(m.Data, d); err != nil { // others may write there
		l.Code, l.Reason = "unreadable", err.Error()
		l.Run, _ = schemas.RunOf(m.Subject)
		return l, nil
	}
	l.Stage, l.Code, l.Reason, l.Run, l.UID = d.Service, d.Code, d.Reason, d.Run, d.UID
	l.Subject, l.Stream, l.Deliveries = d.OriginalSubject, d.Stream, d.Deliveries
	return l, d
}

const (
	// lettersPage is how many dead letters a page has; deadWindow how many sequences one read looks at, of maxWindows.
	lettersPage            = 50
	deadWindow, maxWindows = 500, 20
)

// answerDead answers with dead letters, the newest first, before the sequence before.
func (s *server) answerDead(r *http.Request) (any, error) {
	run := schemas.Run(r.FormValue("run"))
	if run == "" {
		run = "*"
	} else if err := schemas.CheckToken("run", run); err != nil {
		return nil, &requestError{http.StatusBadRequest, err.Error()}
	}
	info, err := s.bus.StreamInfo(r.Context(), schemas.StreamDead)
	if err != nil {
		return nil, err
	}
	before := info.State.LastSeq + 1
	if text := r.FormValue("before"); text != "" {
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil || n == 0 {
			return nil, &requestError{http.StatusBadRequest, "before: must be the number of a dead letter"}
		}
		before = min(n, before)
	}
	filter := schemas.Address{Kind: schemas.KindDead, Run: run}.Filter()
	letters := []*letter{}
	first := max(1, info.State.FirstSeq)
	for range maxWindows {
		if before <= first || len(letters) >= lettersPage {
			break
		}
		from := max(first, before-min(before-1, deadWindow))
		var part []*letter
		o := bus.ReadOptions{FromSeq: from}
		for m, err := range s.bus.Read(r.Context(), schemas.StreamDead, []string{filter}, o) {
			if err != nil {
				return nil, err
			}
			if m.Seq >= before {
				break
			}
			l, _ := letterOf(m)
			if part = append(part, l); len(part) > deadWindow {
				break
			}
		}
		slices.Reverse(part)
		letters, before = append(letters, part...), from
	}
	if len(letters) > lettersPage {
		letters = letters[:lettersPage]
		before = letters[lettersPage-1].ID
	}
	out := map[string]any{"letters": letters, "total": info.State.Msgs}
	if before > first {
		out["before"] = before
	}
	return out, nil
}

// maxOriginal is how many bytes of JSON of a refused message are shown.
const maxOriginal = 64 << 10

// answerLetter answers with one dead letter and its original.
func (s *server) answerLetter(r *http.Request) (any, error) {
	id, err := letterID(r)
	if err != nil {
		return nil, err
	}
	m, err := s.bus.Get(r.Context(), schemas.StreamDead, id)
	if err != nil {
		return nil, err
	}
	l, d := letterOf(m)
	if d == nil {
		return l, nil
	}
	data, err := s.bus.DeadData(r.Context(), d)
	if err != nil && !errors.Is(err, client.ErrNotFound) {
		return nil, err
	}
	if l.Bytes = len(data); schemas.Precheck(data) == nil {
		if text, err := json.Marshal(schemas.JSONOfBytes(data)); err == nil && len(text) <= maxOriginal {
			l.Original = text
		}
	}
	return l, nil
}
