// Package rules finds what a run should not do (schemas.Rules) in what is stored of it, for any trainer: in the rewards
// of its groups, and in the updates and evaluations that trainers tell.
//
// Noise breaks no rule. Numbers are compared over windows: 64 groups, or 8 updates or evaluations of a trainer. A rule
// is broken when the means of two windows in a row are beyond the limit by four standard errors each. The variance is
// the larger one of the window and of all windows so far: a window whose numbers happen to be equal proves nothing by
// itself. The best window is chosen among many, so one window below it would be chance. Updates that leave the weights
// as they were are no matter of chance, and counted.
//
// What a Watch knows is a function of the streams alone. An alarm has a subject of its own for each run and rule: a
// process that was killed reads the streams again, finds the same, and what is stored already stays.
package rules

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

const (
	groupWindow, updateWindow = 64, 8
	margin                    = 4 // standard errors
	// lookEvery is how often a run's rewards are looked at in which no function was seen that a rule is about.
	lookEvery = 16
	// maxRuns and maxSeries bound what is kept: the runs of the newest events, and numbers of each.
	maxRuns, maxSeries = 4096, 64
)

// Watch follows all runs of a pipeline.
type Watch struct {
	bus *bus.Bus
	// raised is called for each alarm that this process has stored.
	raised func(*schemas.Alarm)
	next   map[string]uint64 // sequence by stream
	runs   map[schemas.Run]*run
	found  []*schemas.Alarm // and not stored yet
}

// New returns a watch that has read nothing yet.
func New(b *bus.Bus, raised func(*schemas.Alarm)) *Watch {
	return &Watch{bus: b, raised: raised, next: map[string]uint64{}, runs: map[schemas.Run]*run{}}
}

// source is a stream that a watch reads, and its next message; nil: it has no more.
type source struct {
	stream, kind string
	take         func(context.Context, *bus.Message) error
	next         func() (*bus.Message, error, bool)
	head         *bus.Message
}

// Look reads what is new, in the order in which it was stored, and stores the alarms that follow from it. An error is
// of the server; the next look goes on.
func (w *Watch) Look(ctx context.Context) error {
	sources := []*source{
		{stream: schemas.StreamAdvantages, kind: schemas.KindAdvantage, take: w.takeGroup},
		{stream: schemas.StreamUpdates, kind: schemas.KindUpdate, take: w.takeUpdate},
	}
	for _, s := range sources {
		info, err := w.bus.StreamInfo(ctx, s.stream)
		if err != nil {
			return err
		}
		if info.State.LastSeq+1 < w.next[s.stream] { // the stream was made anew
			*w = *New(w.bus, w.raised)
		}
	}
	for _, s := range sources {
		next, stop := iter.Pull2(w.bus.Read(ctx, s.stream, []string{schemas.Address{Kind: s.kind}.Filter()},
			bus.ReadOptions{FromSeq: w.next[s.stream]}))
		defer stop()
		var err error
		s.next = next
		if s.head, err, _ = next(); err != nil {
			return err
		}
	}
	for {
		sources = slices.DeleteFunc(sources, func(s *source) bool { return s.head == nil })
		if len(sources) == 0 {
			break
		}
		s := slices.MinFunc(sources, func(a, b *source) int { return a.head.Time.Compare(b.head.Time) })
		if err := s.take(ctx, s.head); err != nil {
			return err
		}
		w.next[s.stream] = s.head.Seq + 1
		var err error
		if s.head, err, _ = s.next(); err != nil {
			return err
		}
	}
	for len(w.found) > 0 {
		if err := w.store(ctx, w.found[0]); err != nil {
			return err
		}
		w.found = w.found[1:]
	}
	return nil
}

// store stores an alarm, unless the run has one of the rule. A run that it pauses is paused first: a process that is
// killed in between does so again, and to pause a paused run changes nothing.
func (w *Watch) store(ctx context.Context, a *schemas.Alarm) error {
	_, err := w.bus.StoredEvent(ctx, schemas.StreamUpdates, a.Subject(), &schemas.Alarm{}, nil)
	if !errors.Is(err, bus.ErrNotFound) {
		return err
	}
	if a.Paused {
		c := &schemas.Control{
			Run: a.Run, Action: schemas.ControlPause, By: "rule " + a.Rule, Reason: a.Says, At: a.At,
		}
		if _, err := w.bus.Publish(ctx, c); err != nil {
			return fmt.Errorf("pause run %s: %w", a.Run, err)
		}
	}
	ack, err := w.bus.Publish(ctx, a)
	if err == nil && !ack.Duplicate {
		w.raised(a)
	}
	return err
}

// run is what is known of one run.
type run struct {
	name   schemas.Run
	groups int64
	newest time.Time
	// watched says that its rewards have functions that a rule is about; rules are those of the newest that was read.
	watched   bool
	rules     []schemas.RuleSpec
	functions []string // that score it
	// reward is the mean of about the last 16 groups that are trained on.
	reward float64
	series map[key]*series
	fired  map[string]bool
}

// key names numbers of a run: those of a rule, and of a function or a trainer.
type key struct{ rule, of string }

// of returns what is known of a run, to which something came at a time.
func (w *Watch) of(name schemas.Run, at time.Time) *run {
	r := w.runs[name]
	if r == nil {
		if len(w.runs) >= maxRuns {
			delete(w.runs, slices.MinFunc(slices.Collect(maps.Keys(w.runs)), func(a, b schemas.Run) int {
				return w.runs[a].newest.Compare(w.runs[b].newest)
			}))
		}
		r = &run{name: name, series: map[key]*series{}, fired: map[string]bool{}}
		w.runs[name] = r
	}
	r.newest = at
	return r
}

// takeGroup takes the result of a group, with its rewards where a rule needs them.
func (w *Watch) takeGroup(ctx context.Context, m *bus.Message) error {
	a := &schemas.Advantage{}
	if bus.Fits(m, a) != nil || a.Mean == nil {
		return nil
	}
	r := w.of(a.Run, m.Time)
	var scores map[key]*mean
	if r.watched || a.Validation || r.groups%lookEvery == 0 {
		var err error
		if scores, err = w.scoresOf(ctx, r, a); err != nil {
			return err
		}
	}
	reward := *a.Mean
	if a.Validation {
		reward = r.reward
	} else {
		if r.groups++; r.groups == 1 {
			r.reward = reward
		}
		r.reward += (reward - r.reward) / 16
		w.takeSpread(r, a)
	}
	if r.groups == 0 {
		return nil // nothing is rewarded that a score could be gamed for
	}
	for of, s := range scores {
		w.falls(r, of, groupWindow, s.sum/s.n, reward)
	}
	return nil
}

// takeSpread takes whether the rewards of a group are all equal.
func (w *Watch) takeSpread(r *run, a *schemas.Advantage) {
	var values []float64
	for _, x := range a.Members {
		if x.Reward != nil {
			values = append(values, *x.Reward)
		}
	}
	equal := 0.0
	if len(values) < 2 {
		return
	}
	if slices.Min(values) == slices.Max(values) {
		equal = 1
	}
	w.above(r, schemas.RuleVariance, "", groupWindow, equal)
}

type mean struct{ sum, n float64 }

// scoresOf returns the mean scores of a group of the functions that a rule is about: diversity, what is not rewarded,
// and what a validation measures.
func (w *Watch) scoresOf(ctx context.Context, r *run, a *schemas.Advantage) (map[key]*mean, error) {
	stored, err := w.bus.LastMany(ctx, schemas.StreamRewards, []string{schemas.RewardFilter(a.Run, a.Batch, a.UID)})
	if err != nil {
		return nil, err
	}
	all := map[key]*mean{}
	for _, m := range stored {
		e := &schemas.Reward{}
		if bus.Fits(m, e) != nil {
			continue
		}
		r.rules = e.Group.Rules
		for _, s := range e.Scores {
			if len(r.functions) < schemas.MaxRewards && !slices.Contains(r.functions, s.Name) {
				r.functions = append(r.functions, s.Name)
			}
			of := key{schemas.RuleReader, strings.TrimSpace(s.Name + " " + string(s.Stage))}
			_, instance, _ := strings.Cut(s.Name, ":")
			switch {
			case s.Name == "diversity" || instance == "diversity" || s.Name == "entropy_mean":
				of.rule = schemas.RuleDiversity
			case s.Weight != 0 && !a.Validation:
				continue
			}
			if a.Validation {
				of.of += " of validations"
			}
			r.watched = r.watched || !a.Validation
			if s.Value != nil {
				if all[of] == nil {
					all[of] = &mean{}
				}
				all[of].sum, all[of].n = all[of].sum+*s.Value, all[of].n+1
			}
		}
	}
	return all, nil
}

// takeUpdate takes an update that a trainer tells.
func (w *Watch) takeUpdate(_ context.Context, m *bus.Message) error {
	u := &schemas.Update{}
	if bus.Fits(m, u) != nil || u.Step == 0 {
		return nil
	}
	r, of := w.of(u.Run, m.Time), fmt.Sprintf("trainer %s of %s", u.Trainer, schemas.PolicyKey(u.Lane, u.Tenant))
	for _, number := range u.Numbers() {
		switch x := number.Value; number.Name {
		case "staleness":
			w.above(r, schemas.RuleStale, of, updateWindow, x)
		case "ratio":
			w.above(r, schemas.RuleRatio, of, updateWindow, math.Abs(x-1))
		case "clip_share":
			w.above(r, schemas.RuleClip, of, updateWindow, x)
		case "kl":
			w.above(r, schemas.RuleKL, of, updateWindow, x)
		}
	}
	for _, m := range u.Evaluation {
		if rule := r.ruleOf(m.Name); rule != "" && r.groups > 0 {
			w.falls(r, key{rule, m.Name + " of evaluations by " + of}, updateWindow, m.Value, r.reward)
		}
	}
	s := r.numbers(key{schemas.RuleWeights, of})
	if s == nil {
		return nil
	}
	same := u.WeightsDigest != "" && (u.WeightsDigest == u.WeightsBefore || u.WeightsDigest == s.weights)
	if same || u.GradNorm != nil && *u.GradNorm == 0 {
		s.beyond++
	} else {
		s.beyond = 0
	}
	s.weights = u.WeightsDigest
	if limit := r.limit(schemas.RuleWeights); s.beyond > 0 && float64(s.beyond) >= limit {
		w.find(r, key{schemas.RuleWeights, of}, float64(s.beyond), limit,
			"%s: %d updates in a row, the last one %d, left the weights as they were, or had no gradient", of, s.beyond,
			u.Step)
	}
	return nil
}

// ruleOf returns the rule about an evaluation by its name; "": none is. A reader has the name of a function that scores
// the run, or a word for what shall not fall; trainers evaluate losses, lengths and times, too.
func (r *run) ruleOf(name string) string {
	words := strings.FieldsFunc(strings.ToLower(name), func(c rune) bool { return !unicode.IsLetter(c) })
	has := func(all ...string) bool {
		return slices.ContainsFunc(words, func(w string) bool { return slices.Contains(all, w) })
	}
	switch {
	case has("std", "loss", "error"):
		return ""
	case has("diversity"):
		return schemas.RuleDiversity
	case has("reward", "rewards", "score", "accuracy", "acc", "exact", "gold"),
		slices.ContainsFunc(strings.Split(name, "/"),
			func(part string) bool { return slices.Contains(r.functions, part) }):
		return schemas.RuleReader
	}
	return ""
}

// spec returns what the run's prompts say of a rule.
func (r *run) spec(rule string) schemas.RuleSpec {
	i := slices.IndexFunc(r.rules, func(s schemas.RuleSpec) bool { return s.Name == rule })
	if i < 0 {
		return schemas.RuleSpec{Name: rule}
	}
	return r.rules[i]
}

func (r *run) limit(rule string) float64 {
	return *cmp.Or(r.spec(rule).Limit, new(schemas.RuleNamed(rule).Limit))
}

// numbers returns the numbers of a key; nil: there are too many others.
func (r *run) numbers(k key) *series {
	if r.series[k] == nil {
		if len(r.series) >= maxSeries {
			return nil
		}
		r.series[k] = &series{}
	}
	return r.series[k]
}

// find notes that a run breaks a rule, unless it did before or the rule is off.
func (w *Watch) find(r *run, k key, value, limit float64, says string, args ...any) {
	action := r.spec(k.rule).Action
	if r.fired[k.rule] || action == schemas.RuleOff {
		return
	}
	r.fired[k.rule] = true
	w.found = append(w.found, &schemas.Alarm{
		Run: r.name, Rule: k.rule, Of: k.of, Value: value, Limit: limit, Says: fmt.Sprintf(says, args...),
		Paused: action == schemas.RulePause, At: time.Now().UnixNano(),
	})
}

// above adds a number whose mean should not be above the limit of a rule.
func (w *Watch) above(r *run, rule, of string, size int, x float64) {
	k := key{rule, of}
	s := r.numbers(k)
	if s == nil || !s.add(x, 0, size) {
		return
	}
	limit := r.limit(rule)
	beyond := s.now.mean-margin*math.Sqrt(s.now.variance/float64(size)) > limit
	if s.counts(beyond) {
		w.find(r, k, s.now.mean, limit, "%s: %.4g over %d %s, and %.4g over the %d before; the limit is %g",
			strings.TrimPrefix(of+", "+schemas.RuleNamed(rule).Of, ", "), s.now.mean, size, counted(size, "updates"),
			s.last.mean, size, limit)
	}
}

// falls adds a mean score of a group, or a number of an evaluation, that should not fall: diversity below its first
// window; a function that is not rewarded below its best, while the reward is not below what it was then.
func (w *Watch) falls(r *run, k key, size int, x, reward float64) {
	s := r.numbers(k)
	if s == nil || !s.add(x, reward, size) {
		return
	}
	best := k.rule == schemas.RuleReader
	if !s.begun || best && s.now.mean > s.from.mean {
		s.from, s.begun = s.now, true
	}
	limit, fell := r.limit(k.rule), s.from.mean-s.now.mean
	error := math.Sqrt((max(s.from.variance, s.now.variance) + s.now.variance) / float64(size))
	beyond := fell-margin*error > limit*math.Abs(s.from.mean) && (!best || s.now.reward >= s.from.reward)
	if s.counts(beyond) {
		was, while := "at first", ""
		if best {
			was = "at best"
			while = fmt.Sprintf(", while the reward went from %.4g to %.4g", s.from.reward, s.now.reward)
		}
		share := min(fell/cmp.Or(math.Abs(s.from.mean), 1), schemas.MaxScore)
		w.find(r, k, share, limit, "%s was %.4g over %d %s %s, and is %.4g and "+
			"%.4g in the last two times as many%s", k.of, s.from.mean, size, counted(size, "evaluations"), was,
			s.last.mean, s.now.mean, while)
	}
}

// counted names what a window of a size is of: groups, or what a trainer tells.
func counted(size int, told string) string {
	if size == groupWindow {
		return "groups"
	}
	return told
}

// window is what is known of a full window.
type window struct{ mean, variance, reward float64 }

// series are the numbers of one key.
type series struct {
	points  []float64 // of the window that fills
	rewards float64
	// last and now are the last two windows, from is the one that is compared with, once one has begun.
	last, now, from window
	begun           bool
	// within is the sum of squares in all windows, around the mean of each, freedom how many numbers that is of.
	within, freedom float64
	// beyond is how many windows, or updates, in a row broke the rule; weights are those of the last update.
	beyond  int
	weights string
}

// add adds a number, and the reward beside it. It reports whether a window is full then. One that no score may be is
// left out.
func (s *series) add(x, reward float64, size int) bool {
	if !(math.Abs(x) <= schemas.MaxScore) { // its square would hide all others
		return false
	}
	if s.points, s.rewards = append(s.points, x), s.rewards+reward; len(s.points) < size {
		return false
	}
	n, sum, squares := float64(size), 0.0, 0.0
	for _, x := range s.points {
		sum += x / n
	}
	for _, x := range s.points {
		squares += (x - sum) * (x - sum)
	}
	s.within, s.freedom = s.within+squares, s.freedom+n-1
	s.last, s.now = s.now, window{sum, max(squares/(n-1), s.within/s.freedom), s.rewards / n}
	s.points, s.rewards = s.points[:0], 0
	return true
}

// counts counts a window, and reports whether it and the one before broke the rule.
func (s *series) counts(beyond bool) bool {
	if !beyond {
		s.beyond = 0
		return false
	}
	s.beyond++
	return s.beyond > 1
}
