package integration_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/outcomes"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/intake"
)

// controlled is a pipeline with two samplers, whose server and services can be started again.
type controlled struct {
	*world
	config   config
	services []*bustest.Service
}

func newControlled(t *testing.T) *controlled {
	t.Helper()
	w, _ := plane(t)
	c := &controlled{world: w, config: defaults()}
	c.config.sampler.Batch, c.config.sampler.Workers, c.config.sampler.AckWait = 4, 1, 2*time.Second
	c.config.reward.AckWait, c.config.advantage.AckWait, c.config.intake.AckWait = 2*time.Second, 2*time.Second,
		2*time.Second
	c.serve(t)
	return c
}

func (c *controlled) serve(t *testing.T) {
	t.Helper()
	c.services = nil
	for _, name := range append([]string{"sampler"}, stages...) {
		c.services = append(c.services, c.Serve(t, c.config.run(name)))
	}
}

// restart kills every service, stops the server, and starts them all again.
func (c *controlled) restart(t *testing.T) {
	t.Helper()
	for _, s := range c.services {
		s.Kill()
	}
	c.Options.Listen = strings.TrimPrefix(c.Server.ClientURL(), "nats://")
	if err := c.Server.Close(); err != nil {
		t.Fatal(err)
	}
	c.Start(t)
	c.serve(t)
}

// prompts publishes groups of 8 images with so many pixels a side, the same for every run.
func (c *controlled) prompts(t *testing.T, run schemas.Run, groups, side, steps int, batch bool) {
	t.Helper()
	for i := range groups {
		p := &schemas.Prompt{
			UID: schemas.UID(fmt.Sprintf("g%d", i)), Prompt: fmt.Sprintf("a red fox, number %d", i), Seed: new(int64(i)),
			GroupSize: new(int64(8)),
			ImageSettings: schemas.ImageSettings{
				Height: new(int64(side)), Width: new(int64(side)), NumInferenceSteps: new(int64(steps)),
				Rollout: schemas.Rollout{ReturnStepIndices: []int64{int64(steps)}},
			},
			Reward: []schemas.RewardSpec{{Name: "synthetic"}},
		}
		if batch {
			p.Batch = &schemas.BatchSpec{ID: "b", Groups: int64(groups)}
			p.GroupPolicy = &schemas.GroupPolicy{Failed: schemas.GroupRefill, ZeroStd: schemas.GroupRefill}
		}
		if _, err := c.client.Publish(t.Context(), run, p); err != nil {
			t.Fatal(err)
		}
	}
}

// steps waits until at least n steps of a run are stored.
func (c *controlled) steps(t *testing.T, run schemas.Run, n int) {
	t.Helper()
	bustest.Until(t, fmt.Sprintf("%d steps of run %s", n, run), func() error {
		if got := len(c.stepsOf(t, run)); got < n {
			return fmt.Errorf("%d", got)
		}
		return nil
	})
}

// stepsOf are the sequences of the stored steps of a run.
func (c *controlled) stepsOf(t *testing.T, run schemas.Run) (seqs []uint64) {
	t.Helper()
	for m, err := range c.Read(t.Context(), schemas.StreamSteps,
		[]string{schemas.Address{Kind: schemas.KindStep, Run: run}.Filter()}, bus.ReadOptions{HeadersOnly: true}) {
		if err != nil {
			t.Fatal(err)
		}
		seqs = append(seqs, m.Seq)
	}
	return seqs
}

// do asks for an action, waits until the samplers obey, and returns the boundary: the sequence
// in MDR_STEPS that no later step of what was stopped may have.
func (c *controlled) do(t *testing.T, run schemas.Run, uid schemas.UID, action string) (boundary uint64) {
	t.Helper()
	r, err := c.client.Control(t.Context(), &schemas.Control{
		Run: run, UID: uid, Action: action, By: "ada", Reason: "lunch",
	})
	if err != nil || r.Unchanged != "" {
		t.Fatalf("%s: %+v, %v", action, r, err)
	}
	bustest.Until(t, action+" is obeyed by both samplers", func() error { // one may have been started just now
		n, err := c.client.AwaitControl(t.Context(), r.Seq)
		if err == nil && n < 2 {
			err = fmt.Errorf("%d samplers", n)
		}
		return err
	})
	info, err := c.StreamInfo(t.Context(), schemas.StreamSteps)
	if err != nil {
		t.Fatal(err)
	}
	return info.State.LastSeq
}

// none fails for steps of a run that were stored behind a boundary.
func (c *controlled) none(t *testing.T, run schemas.Run, boundary uint64) {
	t.Helper()
	behind := 0
	for _, seq := range c.stepsOf(t, run) {
		if seq > boundary {
			behind++
		}
	}
	if behind > 0 {
		t.Errorf("%d steps of run %s were stored behind the boundary", behind, run)
	}
}

// contents are the content digests of the trajectories of a run, by group and sample.
func (c *controlled) contents(t *testing.T, run schemas.Run) map[string]string {
	t.Helper()
	out := map[string]string{}
	harness.Each(t, c.Bus, schemas.StreamTrajectories, schemas.Address{Kind: schemas.KindTrajectory, Run: run},
		func(e *schemas.Trajectory) {
			out[fmt.Sprintf("%s/%d", e.UID, e.SampleIndex)] = e.ContentDigest
		})
	return out
}

// A run that is paused under load takes no step, through the kill of every service and the
// restart of the server, while another is finished; resumed, it loses nothing, and its samples
// have the bits of the other's.
func TestControl_Pause(t *testing.T) {
	t.Parallel()
	c := newControlled(t)
	const groups = 4
	c.prompts(t, "paused", groups, 64, 60, false)
	c.steps(t, "paused", 50)
	boundary := c.do(t, "paused", "", schemas.ControlPause)
	c.prompts(t, "other", groups, 64, 60, false)
	c.steps(t, "other", 50)
	c.restart(t)
	c.advantages(t, "other", groups)
	c.none(t, "paused", boundary)
	s, err := c.client.Status(t.Context(), "paused")
	if err != nil || s.State != schemas.RunPaused || s.By != "ada" || s.Reason != "lunch" ||
		s.Parked+s.Trajectories != groups*8 {
		t.Fatalf("status %+v, %v", s, err)
	}
	c.do(t, "paused", "", schemas.ControlResume)
	for uid, a := range c.advantages(t, "paused", groups) {
		if a.Status != schemas.StatusComplete {
			t.Errorf("%s: %s %s", uid, a.Status, a.Error)
		}
	}
	want := c.contents(t, "other")
	for key, digest := range c.contents(t, "paused") {
		if digest != want[key] {
			t.Errorf("%s: another content than without the pause", key)
		}
	}
	if s, err := c.client.Status(t.Context(), "paused"); err != nil || s.State != schemas.StatusComplete ||
		s.Parked != 0 {
		t.Errorf("at the end: %+v, %v", s, err)
	}
}

// A group and then the whole run are cancelled under load: no step behind the boundary, no
// request left, every group and the batch say so, and nothing is refilled.
func TestControl_Cancel(t *testing.T) {
	t.Parallel()
	c := newControlled(t)
	c.prompts(t, "r", 4, 512, 500, true)
	c.prompts(t, "other", 2, 64, 20, false)
	c.steps(t, "r", 20)
	c.do(t, "r", "g3", schemas.ControlCancel)
	a := c.advantages(t, "r", 1)["g3"]
	for n := 2; a == nil; n++ { // others may be complete before it is cancelled
		a = c.advantages(t, "r", n)["g3"]
	}
	if a.Status != schemas.StatusCancelled ||
		!strings.Contains(a.Error, "group g3 was cancelled by ada") || !strings.Contains(a.Error, ": lunch") {
		t.Fatalf("cancelled group: %+v", a)
	}
	c.services[0].Kill()
	c.services[0] = c.Serve(t, c.config.run("sampler"))
	boundary := c.do(t, "r", "", schemas.ControlCancel)
	results := c.advantages(t, "r", 4)
	subject := schemas.BatchSubject("r", "b")
	batch := bustest.Decode[schemas.Batch](t, bustest.Await(t, c.Bus, 1, schemas.StreamAdvantages, subject)[subject])
	for uid, a := range results {
		if a.Status != schemas.StatusCancelled && a.Status != schemas.StatusComplete || a.RefilledBy != "" {
			t.Errorf("%s: %s, refilled by %q", uid, a.Status, a.RefilledBy)
		}
		for _, m := range a.Members {
			if a.Status == schemas.StatusCancelled && (m.Advantage != nil || m.Status == schemas.StatusMissing) {
				t.Errorf("%s: member %+v", uid, m)
			}
		}
	}
	if int(batch.Groups)+len(batch.Dropped) != 4 || batch.Refills != 0 || len(batch.Dropped) < 1 {
		t.Errorf("batch %+v", batch)
	}
	for uid, a := range c.advantages(t, "other", 2) {
		if a.Status != schemas.StatusComplete {
			t.Errorf("of the other run, %s: %s", uid, a.Status)
		}
	}
	c.none(t, "r", boundary)
	s, err := c.client.Status(t.Context(), "r")
	if err != nil || s.State != schemas.StatusCancelled || s.Waiting != 0 || s.Parked != 0 || s.Closed != 4 {
		t.Errorf("status %+v, %v", s, err)
	}
	late := &schemas.Prompt{UID: "late", Prompt: "x"}
	r, err := c.client.Publish(t.Context(), "r", late)
	if refused := (*client.RefusedError)(nil); !errors.As(err, &refused) || refused.Code != schemas.CodeCancelled {
		t.Errorf("a prompt of the cancelled run: %+v, %v", r, err)
	}
	if a := c.advantages(t, "r", 5)["late"]; a.Status != schemas.StatusCancelled {
		t.Errorf("its group: %+v", a)
	}
}

// A prompt that waits for a sampler is cancelled where it waits, and the batch closes whose
// other group is never asked for.
func TestControl_CancelWhatWaits(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cfg := defaults()
	cfg.intake.Models = []schemas.Lane{"later"}
	w.Serve(t, cfg.run("intake"))
	w.Serve(t, cfg.run("advantage"))
	prompt := &schemas.Prompt{
		UID: "g", Prompt: "a red fox",
		Routing: schemas.Routing{Model: "later"},
		Batch:   &schemas.BatchSpec{ID: "b", Groups: 2},
		Reward:  []schemas.RewardSpec{{Name: "synthetic"}},
	}
	if _, err := w.PublishPrompt(t.Context(), "r", bustest.Encode(t, prompt), nil); err != nil {
		t.Fatal(err)
	}
	if r, err := w.client.Control(t.Context(), &schemas.Control{
		Run: "r", UID: "g", Action: schemas.ControlCancel,
	}); err != nil || r.Unchanged != "" {
		t.Fatalf("%+v, %v", r, err)
	}
	if a := w.advantages(t, "r", 1)["g"]; a.Status != schemas.StatusCancelled || a.Batch != "b" {
		t.Errorf("group %+v", a)
	}
	if r, err := w.client.Control(t.Context(), &schemas.Control{Run: "r", Action: schemas.ControlCancel}); err != nil ||
		r.Unchanged != "" {
		t.Fatalf("%+v, %v", r, err)
	}
	subject := schemas.BatchSubject("r", "b")
	batch := bustest.Decode[schemas.Batch](t, bustest.Await(t, w.Bus, 1, schemas.StreamAdvantages, subject)[subject])
	if batch.Groups != 0 || batch.Expected != 2 || len(batch.Dropped) != 1 || batch.Status != schemas.StatusPartial {
		t.Errorf("batch %+v", batch)
	}
}

// A group that closes at its deadline while its run is paused asks for nothing any more: not when
// the run is resumed, and no sampler takes a step for it.
func TestControl_ClosedWhilePaused(t *testing.T) {
	t.Parallel()
	w := start(t, nil)
	prompt := func(uid schemas.UID) *schemas.Prompt {
		return &schemas.Prompt{
			UID: uid, Prompt: "a red fox", GroupSize: new(int64(8)),
			ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(4))},
			Reward:        []schemas.RewardSpec{{Name: "synthetic"}},
		}
	}
	var late *schemas.Prompt
	run := schemas.Run("")
	// A prompt must be taken up before its deadline. On a busy machine that needs a later one, and a run of its own.
	for wait := time.Second; wait < bustest.Patience; wait *= 2 {
		run += "r"
		w.publish(t, run, prompt("first"))
		w.advantages(t, run, 1)
		if _, err := w.client.Control(t.Context(), &schemas.Control{
			Run: run, Action: schemas.ControlPause,
		}); err != nil {
			t.Fatal(err)
		}
		late = prompt("late")
		late.Deadline = new(time.Now().Add(wait).UnixNano())
		if !tooLate(t, w.client, run, late) {
			break
		}
	}
	if a := w.advantages(t, run, 2)["late"]; a.Status == schemas.StatusComplete {
		t.Fatalf("%+v", a)
	}
	bustest.Until(t, "nothing is parked", func() error {
		s, err := w.client.Status(t.Context(), run)
		if err == nil && s.Parked+s.Waiting > 0 {
			err = fmt.Errorf("%+v", s)
		}
		return err
	})
	if r, err := w.client.Control(t.Context(), &schemas.Control{Run: run, Action: schemas.ControlResume}); err != nil ||
		r.Requests != 0 || !outcomes.HasEnded(r.Status.State) {
		t.Errorf("resumed: %+v, %v", r, err)
	}
	// What a sampler gets all the same, it lets be: here a request that comes once more.
	policies, err := w.Policies(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	again, err := intake.Resolve(run, late, policies[0], intake.Origin{Created: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range again {
		if _, err := w.Publish(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	bustest.Until(t, "no request is left", func() error {
		n, err := w.LaneBacklog(t.Context(), again[0].Lane)
		if err == nil && n > 0 {
			err = fmt.Errorf("%d", n)
		}
		return err
	})
	for stream, filter := range map[string]string{
		schemas.StreamTrajectories: schemas.TrajectoryFilter(run, "late"),
		schemas.StreamSteps:        schemas.StepsFilter(run, "late", "*", "*"),
	} {
		if n, err := w.Subjects(t.Context(), stream, filter); err != nil || len(n) > 0 {
			t.Errorf("%s: %d events of the group that has closed, %v", stream, len(n), err)
		}
	}
}

// What cannot be meant is refused with what there is, and is a dead letter; what would change
// nothing says so.
func TestControl_Refused(t *testing.T) {
	t.Parallel()
	w := start(t, nil)
	if _, err := w.client.Publish(t.Context(), "r", &schemas.Prompt{
		UID: "g", Prompt: "a red fox", GroupSize: new(int64(2)),
		ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(2))},
		Reward:        []schemas.RewardSpec{{Name: "synthetic"}},
	}); err != nil {
		t.Fatal(err)
	}
	if a := w.advantages(t, "r", 1)["g"]; a.Status != schemas.StatusComplete {
		t.Fatalf("group %+v", a)
	}
	for _, c := range []struct {
		run    schemas.Run
		uid    schemas.UID
		action string
		say    string
	}{
		{"s", "", schemas.ControlPause, "run: s; must be one of the 1 there are: r"},
		{"r", "h", schemas.ControlCancel, "uid: h; must be one of the 1 groups of run r: g"},
	} {
		_, err := w.client.Control(t.Context(), &schemas.Control{Run: c.run, UID: c.uid, Action: c.action})
		if refused := (*client.RefusedError)(nil); !errors.As(err, &refused) || refused.Code != schemas.CodeInvalid ||
			!strings.Contains(refused.Reason, c.say) {
			t.Errorf("%s of %s %s: %v", c.action, c.run, c.uid, err)
		}
		// The client asks for nothing then; of others that do, intake keeps nothing.
		if _, err := w.Publish(t.Context(), &schemas.Control{
			Run: c.run, UID: c.uid, Action: c.action, At: 1,
		}); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		uid         schemas.UID
		action, say string
	}{
		{"", schemas.ControlCancel, "each of its 1 groups has its result"},
		{"g", schemas.ControlCancel, "group g has its result, complete"},
		{"", schemas.ControlResume, "the run is not paused"},
	} {
		r, err := w.client.Control(t.Context(), &schemas.Control{Run: "r", UID: c.uid, Action: c.action})
		if err != nil || r.Unchanged != c.say {
			t.Errorf("%s %s: %+v, %v", c.action, c.uid, r, err)
		}
	}
	bustest.Until(t, "no control of what is not there is kept", func() error {
		n, err := w.Subjects(t.Context(), schemas.StreamControl, schemas.ControlSubject("s"))
		runs, listed := view.Count(t.Context(), w.Bus, "s")
		if len(n) > 0 || len(runs) > 0 {
			err = fmt.Errorf("%v %v", n, runs)
		}
		return errors.Join(err, listed)
	})
	w.Forge(t, schemas.ControlSubject("r"), []byte("pause, please"))
	w.Forge(t, schemas.ControlSubject("t"), bustest.Encode(t, &schemas.Control{Run: "r", Action: schemas.ControlPause}))
	codes := map[string]int{}
	for _, d := range bustest.Dead(t, w.Bus, 2) {
		codes[d.Code]++
	}
	if codes[schemas.CodeDecode] != 2 {
		t.Errorf("dead letters %v", codes)
	}
	if s, err := w.client.Status(t.Context(), "r"); err != nil || s.State != schemas.StatusComplete {
		t.Errorf("status after all that: %+v, %v", s, err)
	}
	bustest.Until(t, "forged controls gone from their stream", func() error {
		n, err := w.Subjects(t.Context(), schemas.StreamControl, schemas.ControlSubject("t"))
		if len(n) > 0 {
			err = fmt.Errorf("%v", n)
		}
		return err
	})
}

// A rule prunes exactly the samples that it is for, at its step: they have no later one, the
// others the bits that they have without it, and the advantages are those of the survivors.
func TestPrune_Rule(t *testing.T) {
	t.Parallel()
	w := start(t, nil)
	const k, n = 4, 8
	prompt := func() *schemas.Prompt {
		return &schemas.Prompt{
			UID: "g", Prompt: "a red fox", Seed: new(int64(1)), GroupSize: new(int64(n)),
			ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(10))},
			Reward:        []schemas.RewardSpec{{Name: "synthetic"}},
		}
	}
	if _, err := w.client.Publish(t.Context(), "whole", prompt()); err != nil {
		t.Fatal(err)
	}
	w.advantages(t, "whole", 1)
	whole := trajectoriesOf(t, w.Bus, "whole")
	means := make([]float64, n)
	for i, e := range whole {
		for _, l := range e.LogProbs[:k] {
			means[i] += *l / k
		}
	}
	sorted := slices.Sorted(slices.Values(means))
	bound := (sorted[2] + sorted[3]) / 2 // three are below
	p := prompt()
	p.Prune = &schemas.Prune{StepIndex: k, LogProbBelow: &bound}
	if _, err := w.client.Publish(t.Context(), "pruned", p); err != nil {
		t.Fatal(err)
	}
	a := w.advantages(t, "pruned", 1)["g"]
	if a.Status != schemas.StatusPartial {
		t.Errorf("group %s %s", a.Status, a.Error)
	}
	sum := 0.0
	for i, e := range trajectoriesOf(t, w.Bus, "pruned") {
		m := a.Members[i]
		if means[i] >= bound {
			if e.ContentDigest != whole[i].ContentDigest || m.Status != schemas.StatusScored || m.Advantage == nil {
				t.Errorf("sample %d: %s %s, member %+v; want that of the whole", i, e.StopReason, e.Error, m)
				continue
			}
			sum += *m.Advantage
			continue
		}
		if e.StopReason != schemas.StopPruned || len(e.Steps) != k || len(e.Media) > 0 ||
			m.Status != schemas.StatusPruned ||
			m.Advantage != nil || m.Error != e.Error ||
			!strings.Contains(e.Error, "step 4: mean log-prob ") {
			t.Errorf("sample %d: %s after %d steps, %s; member %+v", i, e.StopReason, len(e.Steps), e.Error, m)
		}
		steps, err := w.Subjects(t.Context(), schemas.StreamSteps,
			schemas.Address{Kind: schemas.KindStep, Run: "pruned", UID: "g", Sample: fmt.Sprint(i)}.Filter())
		if err != nil || len(steps) != k {
			t.Errorf("sample %d: %d steps stored, %v; want %d", i, len(steps), err, k)
		}
	}
	if math.Abs(sum) > 1e-9 {
		t.Errorf("advantages of the survivors sum to %v, want 0", sum)
	}
	late := prompt()
	late.UID, late.Prune = "late", &schemas.Prune{StepIndex: 10, LogProbBelow: &bound}
	if _, err := w.client.Publish(t.Context(), "pruned", late); err == nil ||
		!strings.Contains(err.Error(), "prune.step_index: 10; must be below 10") {
		t.Errorf("a rule for after the end: %v", err)
	}
}

// A sample that a control prunes ends at the step that it names, and its group says by whom.
func TestPrune_Control(t *testing.T) {
	t.Parallel()
	w := start(t, nil)
	prompt := &schemas.Prompt{
		UID: "g", Prompt: "a red fox", GroupSize: new(int64(4)),
		ImageSettings: schemas.ImageSettings{NumInferenceSteps: new(int64(10))},
		Reward:        []schemas.RewardSpec{{Name: "synthetic"}},
	}
	ask := func(c schemas.Control) (*schemas.ControlReceipt, error) {
		c.Run, c.By = "r", "trainer"
		return w.client.Control(t.Context(), &c)
	}
	if _, err := w.client.Publish(t.Context(), "r", &schemas.Prompt{
		UID: "first", Prompt: "x", GroupSize: new(int64(1)), Reward: []schemas.RewardSpec{{Name: "synthetic"}},
	}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []schemas.Control{
		{Action: schemas.ControlPause},
		{Action: schemas.ControlPrune, UID: "g", SampleIndex: new(int64(2)), StepIndex: 5},
		{Action: schemas.ControlResume},
	} {
		if c.Action == schemas.ControlPrune {
			if _, err := w.client.Publish(t.Context(), "r", prompt); err != nil {
				t.Fatal(err)
			}
		}
		if r, err := ask(c); err != nil || r.Unchanged != "" {
			t.Fatalf("%s: %+v, %v", c.Action, r, err)
		}
	}
	a := w.advantages(t, "r", 2)["g"]
	for i, m := range a.Members {
		if pruned := m.Status == schemas.StatusPruned; pruned != (i == 2) || pruned &&
			!strings.Contains(m.Error, "sample 2 of group g was pruned by trainer at ") {
			t.Errorf("member %+v", m)
		}
	}
	if e := trajectoriesOf(t, w.Bus, "r")[2]; a.Status != schemas.StatusPartial || e.StopReason != schemas.StopPruned ||
		len(e.Steps) != 5 {
		t.Errorf("group %s, sample %s with %d steps", a.Status, e.StopReason, len(e.Steps))
	}
	if r, err := ask(schemas.Control{Action: schemas.ControlPrune, UID: "g", SampleIndex: new(int64(1))}); err != nil ||
		r.Unchanged != "group g has its result, partial" {
		t.Errorf("prune of a finished sample: %+v, %v", r, err)
	}
}

// trajectoriesOf are those of group g of a run, by sample.
func trajectoriesOf(t *testing.T, b *bus.Bus, run schemas.Run) map[int]*schemas.Trajectory {
	t.Helper()
	out := map[int]*schemas.Trajectory{}
	harness.Each(t, b, schemas.StreamTrajectories, schemas.Address{Kind: schemas.KindTrajectory, Run: run, UID: "g"},
		func(e *schemas.Trajectory) { out[int(e.SampleIndex)] = e })
	return out
}
