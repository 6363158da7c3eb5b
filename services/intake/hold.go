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
	// maxHeld is how many prompts wait in hand, to go on the moment they can; others are
	// put back.
	maxHeld = 64
	// tellAfter is when a client hears that its prompt waits, alarmAfter when health says so,
	// or a tenth of cfg.Hold where that is less.
	tellAfter  = 2 * time.Second
	alarmAfter = 30 * time.Second
	// healthTimeout bounds what health asks the server.
	healthTimeout = 2 * time.Second
	// maxFailures is how often a prompt may fail for reasons that are not its own: the server
	// is away, a stream is not there. Ten times as many deliveries are allowed in all, more
	// than putBacks, which is how often one comes again that waits for all of cfg.Hold.
	maxFailures = 60
	putBacks    = 400
)

// errPutBack ends the work on a prompt that has been handed back.
var errPutBack = errors.New("put back to wait")

// errEnded ends the waiting of a prompt that was cancelled meanwhile.
var errEnded = errors.New("cancelled while it waited")

// holding is the prompts that wait for a service.
type holding struct {
	mu     sync.Mutex
	inHand int
	// reasons by stream sequence; those of prompts that were put back go with time.
	reasons map[uint64]heldPrompt
	// dry is since when lanes have requests and no sampler.
	dry time.Time
}

type heldPrompt struct {
	why          string
	since, until time.Time
}

// enter notes that a prompt waits, and says whether it may do so in hand.
func (h *holding) enter() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.inHand == maxHeld {
		return false
	}
	h.inHand++
	return true
}

func (h *holding) leave() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.inHand--
}

func (h *holding) note(seq uint64, why string, since, until time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.reasons == nil {
		h.reasons = map[uint64]heldPrompt{}
	}
	h.reasons[seq] = heldPrompt{why, since, until}
}

func (h *holding) forget(seq uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.reasons, seq)
}

// leftWait begins what a prompt waits for that is for another pipeline to take.
const leftWait = "left for another pipeline: "

// left says why a prompt is for another pipeline than this one, which is there for one run and its model; "": it is not.
// policy is that of the prompt's lane, nil where no sampler serves it. The run's own prompts are not left: of those that
// cannot be served here an error is returned.
func (s *service) left(v *view, run schemas.Run, p *schemas.Prompt, policy *schemas.Policy) (string, error) {
	mine := s.cfg.Models[0]
	switch known := v.policies[p.Model] != nil; {
	case p.Model == "":
		return fmt.Sprintf(leftWait+"model: empty; must be named: this one serves a run with %q", mine), nil
	case p.Model != mine && known && run == s.cfg.Own:
		return "", bus.Terminal(schemas.CodeUnknownModel, fmt.Errorf("model: %q is not served here; must be %s", p.Model, mine))
	case p.Model != mine && known:
		return fmt.Sprintf(leftWait+"model: %q; this one serves %q", p.Model, mine), nil
	case policy != nil && run != s.cfg.Own:
		if fault := otherCheckpoint(p, policy); fault != nil {
			return leftWait + fault.Error(), nil
		}
	}
	return "", nil
}

// otherCheckpoint says that a prompt is for another checkpoint than its lane serves.
func otherCheckpoint(p *schemas.Prompt, policy *schemas.Policy) error {
	if p.BaseDigest == "" || p.BaseDigest == policy.Checkpoint() {
		return nil
	}
	return fmt.Errorf("base_digest: %.16s; must be the checkpoint that lane %q serves, %.16s", p.BaseDigest, policy.Lane,
		policy.Checkpoint())
}

// settled returns the policy that a prompt is served under, once somebody serves it and
// its rewards can be scored. Until then the prompt waits: in hand, where it goes on at
// once, or put back (errPutBack). It is refused when nobody came before it had waited for
// cfg.Hold, or when its deadline has passed.
func (s *service) settled(ctx context.Context, m *bus.Message, run schemas.Run, p *schemas.Prompt) (policy *schemas.Policy, err error) {
	policy, waiting, err := s.fit(ctx, run, p, false)
	if waiting == "" && err == nil {
		return policy, nil
	}
	inHand, told := s.held.enter(), false
	if inHand {
		s.metrics.held.Inc()
		defer s.metrics.held.Dec()
		defer s.held.leave()
	}
	defer func() {
		if !errors.Is(err, errPutBack) {
			s.held.forget(m.Seq)
		}
	}()
	began, due, deadline := time.Now(), later(m.Time, s.began).Add(s.cfg.Hold), false
	if d := p.Deadline; d != nil && *d < due.UnixNano() {
		due, deadline = time.Unix(0, *d), true
	}
	for {
		// What a view of a moment ago says is not enough to refuse or to hold a prompt.
		policy, waiting, err = s.fit(ctx, run, p, !told && time.Since(began) < viewAge)
		if policy != nil && !deadline && strings.HasPrefix(waiting, versionWait) {
			due = later(due, time.Unix(0, policy.Announced).Add(s.cfg.Hold)) // as long as versions come
		}
		switch {
		case err != nil:
			return nil, err
		case waiting == "":
			return policy, nil
		case strings.HasPrefix(waiting, leftWait):
			if m.Delivered == 1 {
				if err := s.reply(m, &schemas.Receipt{Run: run, UID: p.UID, Waiting: waiting}); err != nil {
					return nil, err
				}
			}
			return nil, s.putBack(m, waiting)
		}
		switch h, err := s.bus.Held(ctx, run, p.UID); {
		case err != nil:
			return nil, err
		case h.Cancelled() != nil:
			return nil, errEnded
		case !time.Now().Before(due) && deadline:
			return nil, late(*p.Deadline, waiting)
		case !time.Now().Before(due):
			code := schemas.CodeUnknownModel
			if policy != nil {
				code = schemas.CodeUnknownReward
			}
			if strings.HasPrefix(waiting, schemas.StreamSteps) || strings.HasPrefix(waiting, versionWait) {
				code = schemas.CodeExhausted
			}
			return nil, bus.Terminal(code, fmt.Errorf("%s; waited until %s", waiting, due.UTC().Format(time.RFC3339)))
		}
		if tell := inHand && time.Since(m.Time) > tellAfter || !inHand && m.Delivered == 1; tell && !told {
			told = true
			zerolog.Ctx(ctx).Warn().Str("run", string(run)).Str("uid", string(p.UID)).Time("until", due).Msg("held: " + waiting)
			receipt := &schemas.Receipt{Run: run, UID: p.UID, Waiting: fmt.Sprintf("%s; held until %s", waiting, due.UTC().Format(time.RFC3339))}
			if err := s.reply(m, receipt); err != nil {
				return nil, err
			}
		}
		if !inHand {
			return nil, s.putBack(m, waiting)
		}
		s.held.note(m.Seq, waiting, m.Time, due)
		t := time.NewTimer(viewAge)
		select {
		case <-s.stopping:
			t.Stop()
			return nil, s.putBack(m, waiting)
		case <-ctx.Done():
			t.Stop()
			return nil, ctx.Err()
		case <-t.C:
		}
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// putBack hands a prompt back, to come again less often than a message may that always
// ends without a result.
func (s *service) putBack(m *bus.Message, why string) error {
	d := max(time.Second, s.cfg.Hold/putBacks, time.Since(m.Time)/putBacks*4)
	select {
	case <-s.stopping:
		d = time.Second
	default:
	}
	if err := m.NakWithDelay(d); err != nil && !errors.Is(err, bus.ErrSettled) {
		return fmt.Errorf("put back: %w", err)
	}
	s.held.note(m.Seq, why, m.Time, time.Now().Add(2*d))
	return errPutBack
}

// fit says under which policy a prompt can be served, or what it waits for.
func (s *service) fit(ctx context.Context, run schemas.Run, p *schemas.Prompt, fresh bool) (policy *schemas.Policy, waiting string, err error) {
	v, err := s.lanes.view(ctx, fresh)
	if err != nil {
		return nil, "", err
	}
	policy, waiting, err = v.pick(p.Model, s.cfg.Models)
	if s.cfg.Own != "" {
		if left, err := s.left(v, run, p, policy); left != "" || err != nil {
			return nil, left, err
		}
	}
	if policy == nil {
		return nil, waiting, err
	}
	if err := otherCheckpoint(p, policy); err != nil {
		return nil, "", bus.Terminal(schemas.CodeUnknownModel, err)
	}
	if waiting = Young(p, policy); waiting != "" {
		if newest := v.newest[policy.Lane]; Young(p, newest) == "" {
			waiting, err = s.notTaken(ctx, newest)
		}
		return policy, waiting, err
	}
	rewards, err := resolveRewards(p, policy, Origin{Reward: s.cfg.Reward})
	if err != nil {
		return nil, "", bus.Terminal(schemas.CodeInvalid, err)
	}
	if waiting, err = v.able(rewards, policy.Text != nil); waiting == "" && err == nil {
		waiting = v.full(time.Now().Add(-min(alarmAfter, s.cfg.Hold/10)))
	}
	return policy, waiting, err
}

// notTaken is what a prompt waits for whose version was pushed, and is served by no sampler.
func (s *service) notTaken(ctx context.Context, p *schemas.Policy) (string, error) {
	why, err := s.lanes.refused(ctx, p)
	if why != "" {
		why = fmt.Sprintf("refused by every sampler of lane %q (%s); push the next", p.Lane, why)
	} else {
		why = fmt.Sprintf("no sampler of lane %q has taken it over yet", p.Lane)
	}
	return fmt.Sprintf(versionWait+"%d; %s", p.PolicyVersion, why), err
}

// onPurpose says that a prompt waits for what is not missing by mistake: weights that a trainer has yet to push, or
// its own pipeline.
func onPurpose(why string) bool {
	return strings.HasPrefix(why, versionWait) || strings.HasPrefix(why, leftWait)
}

// notes are what prompts wait for on purpose.
func (s *service) notes() []string {
	counts, now := map[string]int{}, time.Now()
	s.held.mu.Lock()
	defer s.held.mu.Unlock()
	for _, p := range s.held.reasons {
		if onPurpose(p.why) && now.Before(p.until) {
			counts[p.why]++
		}
	}
	return waits(counts)
}

// waits are lines of how many prompts wait for what.
func waits(counts map[string]int) (lines []string) {
	for _, why := range slices.Sorted(maps.Keys(counts)) {
		lines = append(lines, fmt.Sprintf("%d prompts wait: %s", counts[why], why))
	}
	return lines
}

// stuck is the fault of health: work that has stood still for alarmAfter since nobody is
// there to do it.
func (s *service) stuck() error {
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
		case onPurpose(p.why): // see notes
		case now.Sub(p.since) > alarm:
			counts[p.why]++
		}
	}
	switch {
	case len(unserved) == 0:
		s.held.dry = time.Time{}
	case s.held.dry.IsZero():
		s.held.dry = now
	}
	if s.held.dry.IsZero() || now.Sub(s.held.dry) < alarm {
		unserved = nil
	}
	s.held.mu.Unlock()
	unserved = append(unserved, waits(counts)...)
	if len(unserved) == 0 {
		return nil
	}
	return errors.New(strings.Join(unserved, "; "))
}
