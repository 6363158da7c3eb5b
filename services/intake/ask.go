package intake

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// A server may lose requests, or someone may purge them. Intake then asks again for the samples of open groups that are
// neither made, nor queued, nor parked, nor in the hands of a sampler. The subject of a request names its sample, so
// several intakes ask once, and a sampler makes none that has its trajectory.

// lookEvery is how often intake looks for lost requests.
const lookEvery = 2 * time.Second

// suspects are samples that seemed lost at an earlier look, by the newest entry of presence then: a sampler that has
// one of them in hand says so in its next entry.
type suspects map[schemas.Making]uint64

// askAgainRegularly asks again for lost samples every lookEvery until ctx ends.
func (s *service) askAgainRegularly(ctx context.Context) error {
	seen := suspects{}
	return regularly(ctx, lookEvery, zerolog.WarnLevel, "lost requests not asked for again, trying again",
		func(ctx context.Context) error { return s.askAgain(ctx, &seen) })
}

// askAgain asks for the samples that were lost at the last look and are still; all that are lost now are suspects of
// the next. An error is of the server.
func (s *service) askAgain(ctx context.Context, seen *suspects) error {
	open, err := s.open.list(ctx)
	if err != nil {
		return err
	}
	if len(open) == 0 {
		*seen = suspects{}
		return nil
	}
	lost, err := s.bus.LostSamples(ctx, open)
	if err != nil {
		return err
	}
	if len(lost) == 0 {
		*seen = suspects{}
		return nil
	}
	newest, oldest, err := s.presenceAge(ctx)
	if err != nil {
		return err
	}
	next := suspects{}
	var errs []error
	for _, l := range lost {
		var sure []int64
		for _, i := range l.Samples {
			of := schemas.Making{Run: l.Group.Run, UID: l.Group.UID, SampleIndex: i}
			since, again := (*seen)[of]
			if !again {
				since = newest
			}
			if next[of] = since; again && oldest(l.Group.Lane) > since {
				sure = append(sure, i)
			}
		}
		if len(sure) > 0 {
			errs = append(errs, s.askFor(ctx, l.Group, sure))
		}
	}
	*seen = next
	return errors.Join(errs...)
}

// presenceAge returns the revision of the newest entry of presence, and the function for the oldest entry of the
// samplers of a lane; without a sampler that is above any.
func (s *service) presenceAge(ctx context.Context) (newest uint64, oldest func(schemas.Lane) uint64, err error) {
	present, revisions, err := s.bus.PresentAt(ctx)
	if err != nil {
		return 0, nil, err
	}
	for _, r := range revisions {
		newest = max(newest, r)
	}
	return newest, func(lane schemas.Lane) uint64 {
		least := ^uint64(0)
		for i, p := range present {
			if p.Service == schemas.ServiceSampler && p.Lane == lane {
				least = min(least, revisions[i])
			}
		}
		return least
	}, nil
}

// askFor asks again for lost samples of a group, by its prompt, unless it waits for something: then a later look does.
// A group whose prompt cannot be taken again closes, with the reason. An error is of the server.
func (s *service) askFor(ctx context.Context, g bus.OpenGroup, samples []int64) error {
	if open, err := s.isOpen(ctx, g); err != nil || !open {
		return err
	}
	n, err := s.askByPrompt(ctx, g, samples)
	if _, terminal := errors.AsType[*bus.TerminalError](err); terminal {
		why := fmt.Sprintf("its requests were lost, and cannot be made again: %v", err)
		zerolog.Ctx(ctx).Error().Str("run", string(g.Run)).Str("uid", string(g.UID)).Msg(why)
		return s.failMissingSamples(ctx, g.GroupRecord, why)
	}
	if err == nil && n > 0 {
		zerolog.Ctx(ctx).Warn().Str("run", string(g.Run)).Str("uid", string(g.UID)).Int("samples", n).
			Msg("asked for again: their requests were lost")
	}
	return err
}

// isOpen reports whether a group has neither a result nor a cancel: a run may have been removed, or its end not been
// heard of.
func (s *service) isOpen(ctx context.Context, g bus.OpenGroup) (bool, error) {
	switch h, err := s.bus.ControlsOf(ctx, g.Run, g.UID); {
	case err != nil:
		return false, err
	case h.Cancelled() != nil:
		return false, nil
	}
	_, err := s.bus.Group(ctx, g.Run, g.UID)
	gone := errors.Is(err, bus.ErrNotFound)
	if err == nil {
		_, err = s.bus.Result(ctx, g.Run, g.UID, g.GroupSize, g.Group.Batch)
		gone = err == nil
	}
	switch {
	case gone:
		s.open.remove(g.Run, g.UID)
		return false, nil
	case errors.Is(err, bus.ErrNotFound):
		return true, nil
	}
	return false, err
}

// askByPrompt publishes the requests of lost samples, made from the prompt as it was the first time, and returns how
// many. Without a sampler or a reward service for them it does nothing.
func (s *service) askByPrompt(ctx context.Context, g bus.OpenGroup, samples []int64) (int, error) {
	if len(g.Stages) > 0 {
		return s.askOpenStages(ctx, g, samples)
	}
	p, m := &schemas.Prompt{}, (*bus.Message)(nil)
	m, err := s.bus.Get(ctx, schemas.StreamPrompts, g.Group.PromptSeq)
	switch {
	case errors.Is(err, bus.ErrNotFound):
		return 0, bus.Terminal(schemas.CodeInvalid, errors.New("its prompt is not stored any more; publish it again "+
			"under another uid"))
	case err != nil:
		return 0, err
	case runOf(m.Subject) != g.Run || schemas.Decode(m.Data, p) != nil || p.GroupUID(m.Seq) != g.UID:
		return 0, bus.Terminal(schemas.CodeInvalid, fmt.Errorf("message %d of %s is not its prompt; publish it again "+
			"under another uid", m.Seq, schemas.StreamPrompts))
	}
	p.UID = g.UID
	policies, waiting, err := s.findPolicies(ctx, g.Run, p, true)
	if err != nil || waiting.says != "" {
		if _, terminal := errors.AsType[*bus.TerminalError](err); terminal {
			return 0, nil // another model is served now: it goes on with the first one
		}
		return 0, err
	}
	a, err := s.resolve(ctx, m, g.Run, p, policies, s.bus.PutBlob)
	if err != nil {
		return 0, err
	}
	todo, err := s.claim(ctx, a)
	if err != nil {
		return 0, err
	}
	todo = slices.DeleteFunc(todo, func(r *schemas.Request) bool { return !slices.Contains(samples, r.SampleIndex) })
	if len(todo) == 0 {
		return 0, nil
	}
	if err := s.storePlan(ctx, g.Run, p, a.policy()); err != nil {
		return 0, err
	}
	defer s.space.endTurn(ctx, s.bus, m.Seq)
	if waiting, err := s.beginBatch(ctx, m.Seq, todo, a.stepBytes()); err != nil || waiting.says != "" {
		return 0, err
	}
	return len(todo), s.publishRequests(ctx, g.Run, g.UID, todo)
}
