// Package intake turns each prompt into the requests of its group, one request per sample. The service handles a
// prompt in these steps:
//
//	awaitPolicy      waits until a sampler serves the prompt's lane and a reward service has its functions
//	Resolve          decides every setting: schedule, stochastic steps, seeds, reward functions, estimator
//	claim            stores the group's record, which reserves the prompt's uid in its run
//	publishRequests  publishes the requests, or parks them while the run is paused
//
// A lane is the request queue of a model. A policy is what samplers announce of a lane: the model, its weights and
// its defaults. A prompt that cannot be accepted becomes a dead letter, and its client gets the reason (refuse).
//
// Intake also decides about controls, which operators publish to pause, resume or cancel a run (control.go).
//
// A record is what is stored of a group when a prompt claims its uid; its opening is a copy in the stream of rewards,
// from which the advantage service knows the group. A prompt is held while it waits in this process, and put back when
// the server is to deliver it again later. A view is what runs at a moment: lanes, policies, reward services. A roll,
// under scheduled sampling, has the model step a noised latent down to the timestep that the sample is trained at.
//
// In all handlers an error marked terminal (bus.Terminal) refuses the message, which becomes a dead letter; after any
// other error the server delivers the message again.
package intake

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/tracing"
	"github.com/meander-rl/meander/schemas"
)

// Summary is what the service does, for help and service discovery.
const Summary = "turns prompts into one request per sample"

// Config of the intake service. The help of its fields says what they are.
type Config struct {
	Slots int `key:"slots" range:"1..256" help:"prompts resolved at once"`
	// Models are lanes; the first serves prompts that name none.
	Models []schemas.Lane `key:"models" form:"token" help:"models whose samplers may start later: prompts for them wait instead of being refused; the first serves prompts that name none"`
	// Own are the runs that a pipeline serves. Prompts of other runs that do not name the first of Models, or name
	// another checkpoint of it, are left to other pipelines. Empty: it serves all runs.
	Own          []schemas.Run `key:"-"`
	Reward       []string      `key:"reward" size:"1..MaxRewards" form:"reward_name" help:"reward functions of prompts that name none, when their model names none either"`
	Hold         time.Duration `key:"hold" range:"1s.." help:"how long a prompt is held while no sampler serves its model or no service has its reward functions; then it is refused"`
	ExternalWait time.Duration `key:"external_wait" range:"1s.." help:"how long groups wait for rewards from outside (external) when their prompt has no deadline"`
	AckWait      time.Duration `key:"ack_wait" range:"1s.." help:"redelivery of a prompt whose intake died"`
	DrainTimeout time.Duration `key:"drain_timeout" range:"(0.." help:"time for the work in flight at shutdown"`
	// DiskFree returns how many bytes of the server's disk are free; nil: not known.
	DiskFree func() (int64, error) `key:"-"`
	// Metrics is where the service counts; nil: nowhere.
	Metrics prometheus.Registerer `key:"-"`
	// Health adds a condition of readiness, Note what /readyz says about work that waits on purpose; they may be nil.
	Health func(name string, check func() error) `key:"-"`
	Note   func(say func() []string)             `key:"-"`
}

// DefaultConfig returns settings that work for a laptop and for a cluster.
func DefaultConfig() Config {
	return Config{
		Slots: 4, Reward: []string{"jpeg_compressibility"}, Hold: 30 * time.Minute, ExternalWait: 24 * time.Hour,
		AckWait: 30 * time.Second, DrainTimeout: 10 * time.Second,
	}
}

// Validate checks the settings of intake. It returns all faults joined, each with its field name.
func (c Config) Validate() error { return schemas.CheckFields(&c) }

// Run serves prompts and controls until ctx ends and the work in flight is finished. It fails if the settings are not
// valid or the server cannot be used.
func Run(ctx context.Context, cfg Config, b *bus.Bus, log zerolog.Logger) error {
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("intake config: %w", err)
	}
	s := &service{
		cfg: cfg, bus: b, lanes: &lanes{bus: b, fits: map[versionKey]time.Time{}}, metrics: newInstruments(cfg.Metrics),
		stopping: ctx.Done(), resolving: make(chan struct{}, cfg.Slots), began: time.Now(),
		open: openGroups{known: make(chan struct{})},
	}
	if cfg.Health != nil {
		cfg.Health("lanes", s.checkProgress)
	}
	if cfg.Note != nil {
		cfg.Note(s.waitingNotes)
	}
	consumer, handle := s.metrics.set.Count(bus.ConsumerConfig{
		Durable: schemas.PromptsDurable(),
		AckWait: cfg.AckWait, Slots: cfg.Slots + maxHeld, DrainTimeout: cfg.DrainTimeout,
		OnGiveUp: s.refuse, MaxDeliver: maxFailures,
	}, s.handle)
	controls, rule := s.metrics.set.Count(bus.ConsumerConfig{
		Durable: schemas.ControlDurable(),
		AckWait: cfg.AckWait, Slots: controlSlots, DrainTimeout: cfg.DrainTimeout,
		OnGiveUp: s.refuseControl, MaxDeliver: maxFailures,
	}, s.handleControl)
	g, ctx := errgroup.WithContext(log.WithContext(ctx))
	dry, err := s.answerDry(ctx)
	if err != nil {
		return err
	}
	g.Go(func() error { return b.Consume(ctx, consumer, handle) })
	g.Go(func() error { return b.Consume(ctx, controls, rule) })
	g.Go(func() error { return s.unparkRegularly(ctx) })
	g.Go(func() error { return s.removeClosedRequests(ctx) })
	g.Go(func() error { return s.followOpen(ctx) })
	g.Go(func() error { return s.askAgainRegularly(ctx) })
	g.Go(func() error { return s.announceSpace(ctx) })
	g.Go(func() error { <-ctx.Done(); return dry.Drain() })
	return g.Wait()
}

type service struct {
	cfg   Config
	bus   *bus.Bus
	lanes *lanes

	metrics *instruments
	held    heldPrompts
	open    openGroups
	space   stepSpace
	// stopping ends the waiting at shutdown; resolving holds a token for each prompt that is being resolved.
	stopping  <-chan struct{}
	resolving chan struct{}
	// began is when this process started.
	began time.Time
}

// handle resolves one prompt, claims its uid and publishes its requests. It is idempotent: it requests only samples
// without a trajectory, and none of a group that has its advantage. An error marked terminal refuses the prompt;
// after any other the prompt is delivered again.
func (s *service) handle(ctx context.Context, m *bus.Message) error {
	run := runOf(m.Subject)
	if err := schemas.CheckToken("run", run); err != nil {
		return bus.Terminal(schemas.CodeInvalid, err)
	}
	p, warnings, err := Read(m.Data)
	if err != nil {
		return err
	}
	p.UID = p.GroupUID(m.Seq)
	switch h, err := s.bus.ControlsOf(ctx, run, p.UID); {
	case err != nil:
		return err
	case h.Cancelled() != nil:
		return s.storeCancelled(ctx, m, p, h.Cancelled())
	}
	a, done, err := s.prepare(ctx, m, run, p)
	defer func() { done() }()
	if errors.Is(err, errPutBack) {
		return nil // it is delivered again
	}
	if errors.Is(err, errCancelled) { // once more, to store that
		return s.handle(ctx, m)
	}
	if err != nil {
		return err
	}
	began := time.Now()
	todo, err := s.claim(ctx, a)
	if err != nil {
		return err
	}
	if err := s.storePlan(ctx, run, p, a.policy()); err != nil {
		return err
	}
	accepted := a.receipt(slices.Concat(warnings, Warnings(p, a.policy()), Unscored(a.requests[0])))
	if _, err := tracing.Of(m.Header); err != nil {
		accepted.Warnings = append(accepted.Warnings, err.Error())
	}
	defer s.space.endTurn(ctx, s.bus, m.Seq)
	waiting, err := s.beginBatch(ctx, m.Seq, todo, a.stepBytes())
	if err != nil {
		return err
	}
	if waiting.says != "" { // its client need not wait
		accepted.Warnings = append(accepted.Warnings, waiting.says)
		if err := s.sendReceipt(m, accepted); err != nil {
			return err
		}
		m.Header.Del(schemas.HeaderReply)
		done() // the groups of the batches that it waits for come here, too
		done, err = s.awaitSpace(ctx, m, run, p, todo, a)
		if errors.Is(err, errPutBack) {
			return nil
		}
		if errors.Is(err, errCancelled) {
			return s.handle(ctx, m)
		}
		if err != nil {
			return err
		}
	}
	if err := s.publishRequests(ctx, run, p.UID, todo); err != nil {
		return err
	}
	s.metrics.Prompts.Inc()
	s.metrics.PromptSeconds.Observe(time.Since(began).Seconds())
	zerolog.Ctx(ctx).Info().Str("run", string(run)).Str("uid", string(p.UID)).Int("samples", int(accepted.Samples)).
		Int("published", len(todo)).Int("num_inference_steps", len(a.requests[0].Transitions)).Msg("prompt accepted")
	return s.sendReceipt(m, accepted)
}

// prepare waits until a prompt can be served, and returns its requests. The caller calls done when they are published.
// Errors are those of await.
func (s *service) prepare(ctx context.Context, m *bus.Message, run schemas.Run,
	p *schemas.Prompt,
) (a *asked, done func(), err error) {
	policies, err := s.awaitPolicies(ctx, m, run, p)
	if err != nil {
		return nil, func() {}, err
	}
	done, err = s.startResolving(ctx)
	if err == nil {
		a, err = s.resolve(ctx, m, run, p, policies, s.bus.PutBlob)
	}
	if err == nil {
		err = s.checkLimits(ctx, run, a)
	}
	return a, done, err
}

// startResolving waits until fewer than cfg.Slots prompts are being resolved; done ends what it began.
func (s *service) startResolving(ctx context.Context) (done func(), err error) {
	select {
	case s.resolving <- struct{}{}:
	case <-ctx.Done():
		return func() {}, ctx.Err()
	}
	s.metrics.Resolving.Inc()
	return func() {
		s.metrics.Resolving.Dec()
		<-s.resolving
	}, nil
}

// resolve returns the requests of a prompt, one for each sample of its group. put stores what the samples start with.
func (s *service) resolve(
	ctx context.Context, m *bus.Message, run schemas.Run, p *schemas.Prompt, policies []*schemas.Policy, put putBlob,
) (*asked, error) {
	if len(p.Stages) > 0 {
		return s.resolveStages(ctx, m, run, p, policies, put)
	}
	policy := policies[0]
	if err := s.keepCheckpoint(ctx, run, p, policy); err != nil {
		return nil, err
	}
	if err := s.storeStart(ctx, p, put); err != nil {
		return nil, err
	}
	if err := s.storeConditions(ctx, p, policy, put); err != nil {
		return nil, err
	}
	requests, err := Resolve(run, p, policy,
		Origin{Seq: m.Seq, Created: m.Time, Reward: s.cfg.Reward, ExternalWait: s.cfg.ExternalWait})
	if err == nil {
		err = checkResultSize([]schemas.Request{*requests[0]}, s.bus.MaxInline())
	}
	if err != nil {
		return nil, bus.Terminal(schemas.CodeInvalid, err)
	}
	return &asked{requests: requests, policies: policies}, s.checkBranch(ctx, requests[0], policy)
}

// keepCheckpoint has a prompt that is delivered again name the checkpoint that its group was claimed with, where the
// lane has gone over to another engine since and finishes such groups.
func (s *service) keepCheckpoint(ctx context.Context, run schemas.Run, p *schemas.Prompt,
	policy *schemas.Policy,
) error {
	if !policy.EngineMix || p.BaseDigest != "" {
		return nil
	}
	first, err := s.bus.Group(ctx, run, p.UID)
	if errors.Is(err, bus.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if makes, _ := policy.Makes(first.BaseDigest); makes {
		p.BaseDigest = first.BaseDigest
	}
	return nil
}

// receipt returns the receipt of an accepted prompt.
func (a *asked) receipt(warnings []string) *schemas.Receipt {
	if a.Record == nil {
		return receiptOf(a.requests, warnings)
	}
	g, steps := &a.Record.Group, int64(0)
	for i := range a.Record.Stages {
		of := a.Shapes(i)
		for k := 0; k < len(of) && !g.IsInteraction(g.Stages[i].Name); k++ {
			r := receiptOf(of[k:k+1], nil)
			steps += r.AllSteps() / r.Samples * a.Record.GroupSize / g.Stages[i].Every * g.Rounds / int64(len(of))
		}
	}
	return &schemas.Receipt{
		Accepted: true, Run: a.Record.Run, UID: a.Record.UID, Samples: a.Record.GroupSize, TotalSteps: &steps,
		SDEStepIndices: []int64{}, Warnings: warnings,
	}
}

// receiptOf returns the receipt of an accepted prompt, given the requests of its group.
func receiptOf(requests []*schemas.Request, warnings []string) *schemas.Receipt {
	q := requests[0]
	r := &schemas.Receipt{
		Accepted: true, Run: q.Run, UID: q.UID, Samples: q.GroupSize,
		NumInferenceSteps: int64(len(q.Transitions)), SDEStepIndices: q.StochasticSteps(), Warnings: warnings,
	}
	switch {
	case q.Text != nil: // events of the longest possible answer
		r.TotalSteps = new(q.GroupSize * max(1, (q.Text.MaxNewTokens+q.Text.TokensPerEvent-1)/q.Text.TokensPerEvent))
	case q.ScheduledSampling != nil || q.Group.Tree != nil:
		r.TotalSteps = new(int64)
		for _, q := range requests {
			begin, end := q.Segment()
			*r.TotalSteps += end - begin
		}
	case q.Start != nil:
		r.StartStepIndex = q.Start.StepIndex
	}
	if q.Stop != nil {
		r.StopStepIndex = q.Stop.StepIndex
	}
	return r
}

// publishRequest stores a request in its lane's queue. While the stream is full it waits: that is no fault of the
// prompt. Other errors are of the server.
func (s *service) publishRequest(ctx context.Context, r *schemas.Request) error {
	mine := bus.Against(func(waiting *schemas.Request) (fault, err error) { return r.SameSample(waiting), nil })
	_, err := s.bus.Publish(ctx, r, mine)
	if errors.Is(err, bus.ErrStreamFull) {
		over := s.metrics.stalling()
		_, err = s.bus.Publish(ctx, r, mine, bus.WaitForSpace())
		over()
	}
	if err == nil {
		s.metrics.Requests.Inc()
	}
	return err
}

// sendReceipt sends a receipt to the inbox that the message's reply header names, if any, in the message's encoding. It
// publishes to inboxes only: a prompt must not make intake publish elsewhere.
func (s *service) sendReceipt(m *bus.Message, r schemas.Event) error {
	inbox := m.Header.Get(schemas.HeaderReply)
	if !strings.HasPrefix(inbox, "_INBOX") || strings.ContainsAny(inbox, "*> \t\r\n") {
		return nil
	}
	data, err := schemas.EncodeAnswer(m.Data, r)
	if err != nil {
		return fmt.Errorf("encode receipt: %w", err)
	}
	return s.bus.Conn().Publish(inbox, data)
}

// runOf returns the run that a subject names; "": none.
func runOf(subject string) schemas.Run {
	run, _ := schemas.RunOf(subject)
	return run
}

// regularly calls f until ctx ends, with a pause after each call, and logs that it failed.
func regularly(ctx context.Context, every time.Duration, at zerolog.Level, failed string,
	f func(context.Context) error,
) error {
	for ctx.Err() == nil {
		if err := f(ctx); err != nil && ctx.Err() == nil {
			zerolog.Ctx(ctx).WithLevel(at).Err(err).Msg(failed)
		}
		_ = bus.Pause(ctx, every)
	}
	return nil
}
