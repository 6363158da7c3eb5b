package intake

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

const (
	// maxHeld is how many prompts wait in this process, so that they go on as soon as they can. Others are put back:
	// the server delivers them again after a delay.
	maxHeld = 64
	// tellAfter is how long a prompt waits before its client is told. alarmAfter, or a tenth of cfg.Hold if that is
	// less, is how long it waits before the health check reports it.
	tellAfter  = 2 * time.Second
	alarmAfter = 30 * time.Second
	// healthTimeout bounds the requests of a health check.
	healthTimeout = 2 * time.Second
	// maxFailures is how often a prompt may fail for reasons outside of it: the server is away, a stream is missing.
	// Ten times as many deliveries are allowed in all. That is more than putBacks, which bounds the deliveries of a
	// prompt that waits for all of cfg.Hold.
	maxFailures = 60
	putBacks    = 400
)

// errPutBack ends the handling of a prompt that the server will deliver again.
var errPutBack = errors.New("put back to wait")

// errCancelled is the error of a prompt that was cancelled while it waited.
var errCancelled = errors.New("cancelled while it waited")

// heldPrompts records the prompts that wait for a sampler or a reward service, for health checks and notes.
type heldPrompts struct {
	mu      sync.Mutex
	waiting int // in this process; the others were put back
	// reasons are by stream sequence of the prompt; those of prompts that were put back expire.
	reasons map[uint64]heldPrompt
	// unservedSince is since when some lane has requests and no sampler; zero: none has.
	unservedSince time.Time
}

// heldPrompt is what one prompt waits for. It has waited since the given time; after until the reason has expired.
type heldPrompt struct {
	why          wait
	since, until time.Time
}

// admit reports whether one more prompt may wait in this process, and counts it; false: it must be put back. Each true
// needs a release.
func (h *heldPrompts) admit() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.waiting == maxHeld {
		return false
	}
	h.waiting++
	return true
}

// release ends what admit began.
func (h *heldPrompts) release() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.waiting--
}

// setReason records what the prompt at a stream sequence waits for.
func (h *heldPrompts) setReason(seq uint64, why wait, since, until time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.reasons == nil {
		h.reasons = map[uint64]heldPrompt{}
	}
	h.reasons[seq] = heldPrompt{why, since, until}
}

// removeReason forgets a prompt that waits no more.
func (h *heldPrompts) removeReason(seq uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.reasons, seq)
}

// whyOtherPipeline returns why a prompt must be left to another pipeline, if this one cannot serve it. It is for a
// pipeline that serves runs of its own (cfg.Own) with one model. policy is that of the prompt's lane, nil if no sampler
// serves the lane. A prompt of an own run for another known model is not left: that is a terminal error.
func (s *service) whyOtherPipeline(v *laneView, run schemas.Run, p *schemas.Prompt,
	policy *schemas.Policy,
) (wait, error) {
	mine := s.cfg.Models[0]
	left := func(format string, args ...any) (wait, error) {
		return forOther.waits("left for another pipeline: "+format, args...), nil
	}
	switch known := v.policies[p.Model] != nil; {
	case p.Model == "":
		return left("model: empty; must be named: this one serves a run with %q", mine)
	case p.Model != mine && known && slices.Contains(s.cfg.Own, run):
		return wait{}, bus.Terminal(schemas.CodeUnknownModel,
			fmt.Errorf("model: %q is not served here; must be %s", p.Model, mine))
	case p.Model != mine && known:
		return left("model: %q; this one serves %q", p.Model, mine)
	case policy != nil && !slices.Contains(s.cfg.Own, run):
		if fault := otherCheckpoint(p, policy); fault != nil {
			return left("%v", fault)
		}
	}
	return wait{}, nil
}

// otherCheckpoint returns an error if the prompt asks for another checkpoint than its lane serves, and nil otherwise.
func otherCheckpoint(p *schemas.Prompt, policy *schemas.Policy) error {
	if makes, _ := policy.Makes(p.BaseDigest); makes {
		return nil
	}
	return fmt.Errorf("base_digest: %.16s; must be the checkpoint that lane %q serves, %.16s", p.BaseDigest,
		policy.Lane, policy.Checkpoint())
}

// awaitPolicies waits until samplers serve the prompt's lane, or those of its stages, and its rewards can be scored.
// Then it returns the policies of the lanes. Errors are those of await.
func (s *service) awaitPolicies(ctx context.Context, m *bus.Message, run schemas.Run,
	p *schemas.Prompt,
) (policies []*schemas.Policy, err error) {
	_, err = s.await(ctx, m, run, p, func(fresh bool) (policy *schemas.Policy, waiting wait, err error) {
		if policies, waiting, err = s.findPolicies(ctx, run, p, fresh); len(policies) > 0 {
			policy = policies[len(policies)-1]
		}
		return policy, waiting, err
	})
	return policies, err
}

// findPolicies is findPolicy, or findStages of a prompt with stages.
func (s *service) findPolicies(ctx context.Context, run schemas.Run, p *schemas.Prompt,
	fresh bool,
) ([]*schemas.Policy, wait, error) {
	if len(p.Stages) > 0 {
		return s.findStages(ctx, run, p, fresh)
	}
	policy, waiting, err := s.findPolicy(ctx, run, p, fresh)
	return []*schemas.Policy{policy}, waiting, err
}

// await waits until find says that a prompt waits for nothing, then returns the policy that it found. If too many
// prompts wait in this process, or intake shuts down, the prompt is put back (errPutBack). errCancelled: a control
// cancelled it. After cfg.Hold, or at its deadline, the error is terminal.
func (s *service) await(ctx context.Context, m *bus.Message, run schemas.Run, p *schemas.Prompt,
	find func(fresh bool) (policy *schemas.Policy, waiting wait, err error),
) (policy *schemas.Policy, err error) {
	policy, waiting, err := find(false)
	if waiting.says == "" && err == nil {
		return policy, nil
	}
	waitsHere, told := s.held.admit(), false
	if waitsHere {
		s.metrics.Held.Inc()
		defer s.metrics.Held.Dec()
		defer s.held.release()
	}
	defer func() {
		if !errors.Is(err, errPutBack) {
			s.held.removeReason(m.Seq)
		}
	}()
	began, due, deadline := time.Now(), later(m.Time, s.began).Add(s.cfg.Hold), false
	if d := p.Deadline; d != nil && *d < due.UnixNano() {
		due, deadline = time.Unix(0, *d), true
	}
	for {
		// A cached view is not enough to refuse or to hold a prompt.
		policy, waiting, err = find(!told && time.Since(began) < viewAge)
		if waiting.renewed && !deadline {
			due = later(due, time.Unix(0, policy.Announced).Add(s.cfg.Hold)) // as long as versions come
		}
		switch {
		case err != nil:
			return nil, err
		case waiting.says == "":
			return policy, nil
		case waiting.elsewhere:
			if m.Delivered == 1 {
				if err := s.sendReceipt(m, &schemas.Receipt{Run: run, UID: p.UID, Waiting: waiting.says}); err != nil {
					return nil, err
				}
			}
			return nil, s.putBack(m, waiting)
		}
		switch h, err := s.bus.ControlsOf(ctx, run, p.UID); {
		case err != nil:
			return nil, err
		case h.Cancelled() != nil:
			return nil, errCancelled
		case !time.Now().Before(due) && deadline:
			return nil, tooLate(*p.Deadline, waiting.says)
		case !time.Now().Before(due):
			return nil, bus.Terminal(waiting.code,
				fmt.Errorf("%s; waited until %s", waiting.says, due.UTC().Format(time.RFC3339)))
		}
		if tell := waitsHere && time.Since(m.Time) > tellAfter || !waitsHere && m.Delivered == 1; tell && !told {
			told = true
			zerolog.Ctx(ctx).Warn().Str("run", string(run)).Str("uid", string(p.UID)).Time("until", due).
				Msg("held: " + waiting.says)
			told := fmt.Sprintf("%s; held until %s", waiting.says, due.UTC().Format(time.RFC3339))
			if err := s.sendReceipt(m, &schemas.Receipt{Run: run, UID: p.UID, Waiting: told}); err != nil {
				return nil, err
			}
		}
		if !waitsHere {
			return nil, s.putBack(m, waiting)
		}
		s.held.setReason(m.Seq, waiting, m.Time, due)
		select {
		case <-s.stopping:
			return nil, s.putBack(m, waiting)
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(viewAge):
		}
	}
}

// later returns the later of two times.
func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// putBack asks the server to deliver a prompt again later. The delay grows with the time that the prompt has waited, so
// that it stays below the limit of deliveries. On success it returns errPutBack, which tells handle that the message is
// done with for now.
func (s *service) putBack(m *bus.Message, why wait) error {
	d := max(time.Second, s.cfg.Hold/putBacks, time.Since(m.Time)/putBacks*4)
	select {
	case <-s.stopping:
		d = time.Second
	default:
	}
	if err := m.NakWithDelay(d); err != nil && !errors.Is(err, bus.ErrAcknowledged) {
		return fmt.Errorf("put back: %w", err)
	}
	s.held.setReason(m.Seq, why, m.Time, time.Now().Add(2*d))
	return errPutBack
}

// findPolicy returns the policy of the prompt's lane, and in waiting what the prompt waits for before it can be
// served under that policy. awaitPolicies calls it again and again. Terminal errors refuse the prompt;
// others are of the server. fresh asks for a new view of what runs.
func (s *service) findPolicy(ctx context.Context, run schemas.Run, p *schemas.Prompt,
	fresh bool,
) (policy *schemas.Policy, waiting wait, err error) {
	v, err := s.lanes.view(ctx, fresh)
	if err != nil {
		return nil, wait{}, err
	}
	policy, waiting, err = v.pick(p, s.cfg.Models)
	if s.cfg.Own != nil {
		if left, err := s.whyOtherPipeline(v, run, p, policy); left.says != "" || err != nil {
			return nil, left, err
		}
	}
	if policy == nil {
		return nil, waiting, err
	}
	if waiting, err = s.findVersion(ctx, v, p, policy); waiting.says != "" || err != nil {
		return policy, waiting, err
	}
	if waiting, err = s.findRewards(v, p, policy); waiting.says == "" && err == nil {
		waiting = v.whyStepsFull(s.alarmTime())
	}
	return policy, waiting, err
}

// alarmTime is since when a wait is worth an alarm.
func (s *service) alarmTime() time.Time { return time.Now().Add(-min(alarmAfter, s.cfg.Hold/10)) }

// findLane returns the policy of the lane that a prompt names, in a view of what runs, and what the prompt waits for of
// it.
func (s *service) findLane(ctx context.Context, v *laneView, p *schemas.Prompt) (*schemas.Policy, wait, error) {
	policy, waiting, err := v.pick(p, s.cfg.Models)
	if policy != nil && err == nil && waiting.says == "" {
		waiting, err = s.findVersion(ctx, v, p, policy)
	}
	return policy, waiting, err
}

// findVersion returns what a prompt waits for before its lane serves the version that it asks for. One for another
// checkpoint is refused.
func (s *service) findVersion(ctx context.Context, v *laneView, p *schemas.Prompt,
	policy *schemas.Policy,
) (waiting wait, err error) {
	if err := otherCheckpoint(p, policy); err != nil {
		return wait{}, bus.Terminal(schemas.CodeUnknownModel, err)
	}
	if waiting = forVersion.waits("%s", PolicyPending(p, policy)); waiting.says != "" {
		if newest := v.newest[policy.Lineage()]; PolicyPending(p, newest) == "" {
			waiting, err = s.whyNotServed(ctx, newest)
		}
	} else if p.PolicyVersion != nil && *p.PolicyVersion != policy.PolicyVersion {
		err = s.lanes.checkVersion(ctx, policy, *p.PolicyVersion)
	}
	return waiting, err
}

// findRewards returns what a prompt waits for before its rewards can be scored.
func (s *service) findRewards(v *laneView, p *schemas.Prompt, policy *schemas.Policy) (wait, error) {
	rewards, err := resolveRewards(p, policy, Origin{Reward: s.cfg.Reward})
	if err != nil {
		return wait{}, bus.Terminal(schemas.CodeInvalid, err)
	}
	return v.whyNotScorable(rewards, mediaOf(p, policy))
}

// whyNotServed returns why no sampler serves a version that was pushed: samplers have refused it, or none has loaded it
// yet.
func (s *service) whyNotServed(ctx context.Context, p *schemas.Policy) (wait, error) {
	why, err := s.lanes.whyRefused(ctx, p)
	if why != "" {
		why = fmt.Sprintf("refused by the samplers of lane %q (%s); push the next", p.Lineage(), why)
	} else {
		why = fmt.Sprintf("no sampler of lane %q has taken it over yet", p.Lineage())
	}
	return forVersion.waits("min_policy_version: %d; %s", p.PolicyVersion, why), err
}

// waitingNotes returns lines for /readyz: how many prompts wait for something that is as it should be, such as
// another pipeline.
func (s *service) waitingNotes() []string {
	counts, now := map[string]int{}, time.Now()
	s.held.mu.Lock()
	defer s.held.mu.Unlock()
	for _, p := range s.held.reasons {
		if p.why.expected && now.Before(p.until) {
			counts[p.why.says]++
		}
	}
	return waitLines(counts)
}

// waitLines formats counts of prompts by what they wait for, one line each, sorted.
func waitLines(counts map[string]int) (lines []string) {
	for _, why := range slices.Sorted(maps.Keys(counts)) {
		lines = append(lines, fmt.Sprintf("%d prompts wait: %s", counts[why], why))
	}
	return lines
}

// checkProgress is intake's health check. Its error names requests and prompts that have waited longer than
// alarmAfter for a sampler or a reward service.
func (s *service) checkProgress() error {
	if !s.bus.Conn().IsConnected() { // another check says so
		return nil
	}
	ctx, stop := context.WithTimeout(context.Background(), healthTimeout)
	defer stop()
	unserved, err := s.lanes.unserved(ctx)
	if err != nil {
		return err
	}
	now, alarm := time.Now(), min(alarmAfter, s.cfg.Hold/10)
	counts := map[string]int{}
	s.held.mu.Lock()
	for seq, p := range s.held.reasons {
		switch {
		case now.After(p.until):
			delete(s.held.reasons, seq)
		case p.why.expected: // see waitingNotes
		case now.Sub(p.since) > alarm:
			counts[p.why.says]++
		}
	}
	switch {
	case len(unserved) == 0:
		s.held.unservedSince = time.Time{}
	case s.held.unservedSince.IsZero():
		s.held.unservedSince = now
	}
	if s.held.unservedSince.IsZero() || now.Sub(s.held.unservedSince) < alarm {
		unserved = nil
	}
	s.held.mu.Unlock()
	unserved = append(unserved, waitLines(counts)...)
	if len(unserved) == 0 {
		return nil
	}
	return errors.New(strings.Join(unserved, "; "))
}

// need is a kind of thing that prompts wait for.
type need struct {
	// code is that of the refusal of a prompt that has waited for cfg.Hold.
	code string
	// expected says that it is no alarm: another does it in its own time.
	expected bool
	// renewed says that cfg.Hold begins anew with each version of the lane.
	renewed bool
	// elsewhere says that other processes serve the prompt: it is put back to them.
	elsewhere bool
}

// What prompts wait for: a sampler, reward services, space for their steps, weights that a trainer pushes, and another
// pipeline.
var (
	forModel   = need{code: schemas.CodeUnknownModel}
	forReward  = need{code: schemas.CodeUnknownReward}
	forSpace   = need{code: schemas.CodeExhausted}
	forVersion = need{code: schemas.CodeExhausted, expected: true, renewed: true}
	forOther   = need{code: schemas.CodeUnknownModel, expected: true, elsewhere: true}
)

// wait is what a prompt waits for, in words; "": nothing.
type wait struct {
	need
	says string
}

// waits formats what a prompt waits for.
func (n need) waits(format string, args ...any) wait { return wait{n, fmt.Sprintf(format, args...)} }
