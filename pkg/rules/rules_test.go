package rules_test

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/rules"
	"github.com/meander-rl/meander/schemas"
)

const digest = "2b5a4e5d1a7e2b5a4e5d1a7e2b5a4e5d1a7e2b5a4e5d1a7e2b5a4e5d1a7e0000"

// world is a plane on which this test plays the advantage service and the trainer of one run after the other.
type world struct {
	*bus.Bus
	*rand.Rand
	t     *testing.T
	rules []schemas.RuleSpec
}

func newWorld(t *testing.T) *world {
	return &world{Bus: bustest.New(t).Connect(t), Rand: rand.New(rand.NewPCG(1, 2)), t: t}
}

func (w *world) put(e schemas.Keyed) {
	w.t.Helper()
	if _, err := w.Publish(w.t.Context(), e); err != nil {
		w.t.Fatal(err)
	}
}

// group stores a group of two samples with this mean reward, half as far apart as noise says, and the scores of more
// functions, which are not rewarded.
func (w *world) group(run schemas.Run, n int, validation bool, reward, noise float64, scores map[string]float64) {
	w.t.Helper()
	uid := schemas.UID(fmt.Sprintf("g%d", n))
	a := &schemas.Advantage{
		Run: run, UID: uid, Batch: string(uid), Status: schemas.StatusComplete, GroupSize: 2, Mean: &reward,
		Std: new(0.0), Scale: schemas.StdGroup, StdBasis: schemas.BasisSample, Estimator: "flow_grpo", Epsilon: 1e-4,
		ScheduleDigest: digest, Validation: validation,
	}
	spec := schemas.Group{Batch: string(uid), Reward: []schemas.RewardSpec{}, Rules: w.rules, Validation: validation}
	for i := range int64(2) {
		value := reward + noise*float64(2*i-1)
		a.Members = append(a.Members, schemas.Member{
			SampleIndex: i, Reward: &value, Advantage: new(0.0), Status: schemas.StatusScored, TrajectorySeq: 1,
		})
		r := &schemas.Reward{
			Run: run, UID: uid, SampleIndex: i, GroupSize: 2, Status: schemas.StatusScored, Reward: &value,
			TrajectorySeq: 1, Group: spec, Scores: []schemas.Score{{
				Name: "glyph", Version: "1", Weight: 1, Status: schemas.StatusScored, Value: &value,
			}},
			Trained: schemas.Trained{ScheduleDigest: digest},
		}
		for _, name := range slices.Sorted(maps.Keys(scores)) {
			r.Scores = append(r.Scores, schemas.Score{
				Name: name, Version: "1", Status: schemas.StatusScored, Value: new(scores[name] + 0.1*w.NormFloat64()),
			})
		}
		w.put(r)
	}
	w.put(a)
}

// update stores an update of a run.
func (w *world) update(run schemas.Run, step int64, change func(u *schemas.Update)) {
	w.t.Helper()
	u := &schemas.Update{
		Run: run, Lane: "signs", Tenant: schemas.TenantMain, Trainer: "main", Step: step, Batches: []string{},
		WeightsDigest: "w" + strconv.FormatInt(step, 10), WeightsBefore: "w" + strconv.FormatInt(step-1, 10),
	}
	change(u)
	w.put(u)
}

// alarms looks with a watch that has seen nothing, and returns the rules of the alarms that are stored then.
func (w *world) alarms(run schemas.Run) map[string]*schemas.Alarm {
	w.t.Helper()
	if err := rules.New(w.Bus, func(*schemas.Alarm) {}).Look(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
	all := map[string]*schemas.Alarm{}
	for m, err := range w.Read(w.t.Context(), schemas.StreamUpdates,
		[]string{schemas.Address{Kind: schemas.KindAlarm, Run: run}.Filter()}, bus.ReadOptions{}) {
		a := &schemas.Alarm{}
		if err == nil {
			err = bus.Fits(m, a)
		}
		if err != nil {
			w.t.Fatal(err)
		}
		all[a.Rule] = a
	}
	return all
}

// want fails unless the run has broken these rules, and says so in the words.
func (w *world) want(run schemas.Run, words string, names ...string) {
	w.t.Helper()
	got := w.alarms(run)
	if list := slices.Sorted(maps.Keys(got)); !slices.Equal(list, names) {
		w.t.Errorf("run %s breaks %v, want %v", run, list, names)
	}
	for _, a := range got {
		if !strings.Contains(a.Says, words) {
			w.t.Errorf("run %s: %q, want %q", run, a.Says, words)
		}
	}
}

// Each rule of groups has a run that breaks it, and runs that nearly do.
func TestRules_Groups(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const groups = 3 * 64
	late := func(n int, before, after float64) float64 { // after the first window
		if n < 64 {
			return before
		}
		return after
	}
	one := func(name string, value func(n int) float64) func(n int) (float64, float64, map[string]float64) {
		return func(n int) (float64, float64, map[string]float64) {
			return 0.3 + float64(n)/1000, 0.1, map[string]float64{name: value(n)}
		}
	}
	for run, tt := range map[schemas.Run]struct {
		group func(n int) (reward, noise float64, scores map[string]float64)
		words string
		want  []string
	}{
		"gamed": {
			one("ocr", func(n int) float64 { return late(n, 0.8, 0.4) }), "ocr was ", []string{schemas.RuleReader},
		},
		"learns":    {one("ocr", func(n int) float64 { return 0.5 + float64(n)/1000 }), "", nil},
		"noisy":     {one("ocr", func(int) float64 { return w.Float64() }), "", nil},
		"dips once": {one("ocr", func(n int) float64 { return late(n%128, 0.8, 0.4) }), "", nil},
		"both worse": {func(n int) (float64, float64, map[string]float64) {
			return late(n, 0.8, 0.4), 0.1, map[string]float64{"ocr": late(n, 0.8, 0.4)}
		}, "", nil},
		"narrow":      {one("diversity", func(n int) float64 { return late(n, 0.9, 0.4) }), "diversity was ", []string{schemas.RuleDiversity}},
		"a bit less":  {one("diversity", func(n int) float64 { return late(n, 0.9, 0.8) }), "", nil},
		"sure":        {one("entropy_mean", func(n int) float64 { return late(n, 2, 1) }), "entropy_mean was", []string{schemas.RuleDiversity}},
		"no variance": {func(int) (float64, float64, map[string]float64) { return 1, 0, nil }, "equal", []string{schemas.RuleVariance}},
		"half of them": {func(n int) (float64, float64, map[string]float64) {
			return 1, float64(n % 2), nil
		}, "", nil},
	} {
		run = schemas.Run(strings.ReplaceAll(string(run), " ", "-"))
		for n := range groups {
			reward, noise, scores := tt.group(n)
			w.group(run, n, false, reward, noise, scores)
		}
		w.want(run, tt.words, tt.want...)
	}
	for n := range groups { // a validation measures what the training rewards
		w.group("overfits", 2*n, false, 0.3+float64(n)/1000, 0.1, nil)
		w.group("overfits", 2*n+1, true, late(n, 0.8, 0.3), 0.1, nil)
	}
	w.want("overfits", "glyph of validations was ", schemas.RuleReader)
}

// Each rule of updates has a trainer that breaks it, and one that nearly does.
func TestRules_Updates(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for run, tt := range map[schemas.Run]struct {
		change func(u *schemas.Update)
		want   []string
	}{
		"stale":    {func(u *schemas.Update) { u.Staleness = new(9 + u.Step%2) }, []string{schemas.RuleStale}},
		"ahead":    {func(u *schemas.Update) { u.Staleness = new(u.Step % 5) }, nil},
		"drifts":   {func(u *schemas.Update) { u.Ratio = new(0.7 + float64(u.Step%2)/50) }, []string{schemas.RuleRatio}},
		"on":       {func(u *schemas.Update) { u.Ratio = new(1 + 0.08*w.NormFloat64()) }, nil},
		"clips":    {func(u *schemas.Update) { u.ClipShare = new(0.9 + float64(u.Step%2)/50) }, []string{schemas.RuleClip}},
		"some":     {func(u *schemas.Update) { u.ClipShare = new(w.Float64()) }, nil},
		"far":      {func(u *schemas.Update) { u.KL = new(3 + float64(u.Step%2)) }, []string{schemas.RuleKL}},
		"a spike":  {func(u *schemas.Update) { u.KL = new(float64(u.Step % 16 / 15 * 100)) }, nil},
		"dead":     {func(u *schemas.Update) { u.WeightsDigest, u.WeightsBefore = "w", "" }, []string{schemas.RuleWeights}},
		"zero":     {func(u *schemas.Update) { u.WeightsDigest, u.GradNorm = "", new(0.0) }, []string{schemas.RuleWeights}},
		"now then": {func(u *schemas.Update) { u.GradNorm = new(float64(u.Step % 3)) }, nil},
		"silent":   {func(u *schemas.Update) { u.WeightsDigest, u.WeightsBefore = "", "" }, nil},
	} {
		run = schemas.Run(strings.ReplaceAll(string(run), " ", "-"))
		for step := range int64(24) {
			w.update(run, step+1, tt.change)
		}
		w.want(run, "trainer main of signs.main", tt.want...)
	}
}

// Evaluations that a trainer tells are read as held-out readers, unless they are of what may fall, while the reward of
// the run's groups does not.
func TestRules_Evaluations(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for run, tt := range map[schemas.Run]struct {
		name   string
		reward func(n int) float64
		value  func(n int) float64
		want   []string
	}{
		"falls":     {"exact", rising, falling, []string{schemas.RuleReader}},
		"of-verl":   {"val-core/signs/reward/mean@4", rising, falling, []string{schemas.RuleReader}},
		"function":  {"glyph", rising, falling, []string{schemas.RuleReader}},
		"varied":    {"diversity", rising, falling, []string{schemas.RuleDiversity}},
		"good":      {"exact", rising, rising, nil},
		"loss":      {"loss", rising, falling, nil},
		"spread":    {"reward_std", rising, falling, nil},
		"seconds":   {"runtime", rising, falling, nil},
		"both":      {"exact", falling, falling, nil},
		"no-groups": {"exact", nil, falling, nil},
	} {
		for n := range 32 {
			for k := 0; k < 4 && tt.reward != nil; k++ {
				w.group(run, 4*n+k, false, tt.reward(n), 0.1, nil)
			}
			w.update(run, int64(n+1), func(u *schemas.Update) {
				u.Evaluation = []schemas.Metric{{Name: tt.name, Value: tt.value(n)}}
			})
		}
		w.want(run, tt.name+" of evaluations by trainer main of signs.main was ", tt.want...)
	}
}

func rising(n int) float64  { return 0.3 + float64(n)/100 }
func falling(n int) float64 { return 0.9 - float64(n/8)/5 }

// Prompts of a run choose limits, switch rules off, and have one pause the run: once, however many watches there are,
// and whatever dies. Strangers' events change nothing.
func TestRules_Settings(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	break3 := func(run schemas.Run, specs ...schemas.RuleSpec) {
		w.rules = specs
		for n := range 3 * 64 {
			w.group(run, n, false, 1, 0, nil)
		}
		w.update(run, 1, func(u *schemas.Update) { u.KL = new(9.0) })
	}
	break3("off", schemas.RuleSpec{Name: schemas.RuleVariance, Action: schemas.RuleOff})
	w.want("off", "")
	break3("far", schemas.RuleSpec{Name: schemas.RuleVariance, Limit: new(1.0)})
	w.want("far", "")
	break3("stop", schemas.RuleSpec{Name: schemas.RuleVariance, Limit: new(0.9), Action: schemas.RulePause})
	for range 3 {
		w.want("stop", "the limit is 0.9", schemas.RuleVariance)
	}
	if !w.alarms("stop")[schemas.RuleVariance].Paused {
		t.Error("the alarm does not say that the run is paused")
	}
	controls := bustest.Await(t, w.Bus, 1, schemas.StreamControl, schemas.ControlSubject("stop"))
	for _, m := range controls {
		c := bustest.Decode[schemas.Control](t, m)
		if c.Action != schemas.ControlPause || c.By != "rule variance" || c.Seq != 0 {
			t.Errorf("control %+v", c)
		}
	}
	info, err := w.StreamInfo(t.Context(), schemas.StreamControl)
	if err != nil || info.State.LastSeq != 1 {
		t.Errorf("%d controls, %v; want one", info.State.LastSeq, err)
	}
	for _, garbage := range []string{"", "\x80", "\xc1"} {
		for _, subject := range []string{
			schemas.AdvantageSubject("x", schemas.UID("g"+strconv.Itoa(len(garbage)))),
			schemas.UpdateSubject("x", "signs", "main", "main", int64(len(garbage))),
		} {
			if _, err := w.PublishRaw(t.Context(), subject, []byte(garbage), nil, ""); err != nil {
				t.Fatal(err)
			}
		}
	}
	w.want("x", "")
}

// What a trainer tells that no alarm can hold, or that no number beside it can be compared with, keeps no rule from
// being found: neither its own nor one of another run.
func TestRules_Extremes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	told := func(run schemas.Run, change func(u *schemas.Update)) {
		for step := range int64(32) {
			w.group(run, int(step), false, rising(int(step)), 0.1, nil)
			w.update(run, step+1, change)
		}
	}
	long := "exact/" + strings.Repeat("x", schemas.MaxName-6)
	told("long", func(u *schemas.Update) {
		u.Evaluation = []schemas.Metric{{Name: long, Value: falling(int(u.Step))}}
	})
	told("tiny", func(u *schemas.Update) {
		value := math.SmallestNonzeroFloat64
		if u.Step > 8 {
			value = -1e29
		}
		u.Evaluation = []schemas.Metric{{Name: "exact", Value: value}}
	})
	told("overflows", func(u *schemas.Update) {
		if u.KL = new(3.0); u.Step == 2 {
			u.KL = new(1e200)
		}
	})
	w.want("long", "exact/xxx", schemas.RuleReader)
	w.want("tiny", "exact of evaluations", schemas.RuleReader)
	w.want("overflows", "", schemas.RuleKL)
	w.rules = []schemas.RuleSpec{{Name: schemas.RuleWeights, Limit: new(0.0)}}
	told("moves", func(*schemas.Update) {})
	w.want("moves", "")
	w.rules = []schemas.RuleSpec{{Name: schemas.RuleWeights, Limit: new(2.5)}}
	told("twice", func(u *schemas.Update) {
		if u.Step < 20 && u.Step%3 > 0 { // two in a row, then one that moves
			u.GradNorm = new(0.0)
		}
	})
	w.want("twice", "")
}

// A run that measures alone has no reward that its scores could be gamed for.
func TestRules_ValidationsAlone(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for n := range 3 * 64 { // harder prompts after the first ones
		w.group("measures", n, true, 0.9-float64(n/64)/4, 0.1, nil)
	}
	w.want("measures", "")
}
