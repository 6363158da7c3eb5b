package sampler

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/devices"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/intake"
	"github.com/meander-rl/meander/services/sampler/engine"
	"github.com/meander-rl/meander/services/sampler/engine/images"
	"github.com/meander-rl/meander/services/sampler/models"
)

// scripted is the synthetic model, which does what a test says before each evaluation.
type scripted struct {
	model.Model
	calls  atomic.Int64
	before func(call int64) error
}

func (m *scripted) Velocity(ctx context.Context, rows []model.Row, size model.Size) error {
	if call := m.calls.Add(1); m.before != nil {
		if err := m.before(call); err != nil {
			return err
		}
	}
	return m.Model.Velocity(ctx, rows, size)
}

// theatre is a sampler of a scripted model on an event plane.
type theatre struct {
	*bustest.Plane
	t     *testing.T
	model *scripted
	// second is the model on another device; nil: there is one device.
	second *scripted
	notes  []func() []string
	ended  chan error
}

func open(t *testing.T, before func(call int64) error) *theatre {
	t.Helper()
	m, err := DefaultConfig().Models.Open("synthetic", model.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return &theatre{Plane: bustest.New(t), t: t, model: &scripted{Model: m, before: before}, ended: make(chan error, 2)}
}

// serve starts the sampler, and returns once it is announced.
func (x *theatre) serve(change ...func(*Config)) *bustest.Service {
	x.t.Helper()
	announced := make(chan struct{})
	c := DefaultConfig()
	c.Batch, c.Workers, c.Announced, c.Note = 4, 1, func() { close(announced) },
		func(say func() []string) { x.notes = append(x.notes, say) }
	for _, f := range change {
		f(&c)
	}
	on := &models.Devices{All: []models.Device{{
		Device: devices.Device{ID: "script"}, Network: &images.Network{Model: x.model},
	}}}
	if x.second != nil {
		c.Workers = 2
		second := models.Device{Device: devices.Device{ID: "second"}, Network: &images.Network{Model: x.second}}
		on.All = append(on.All, second)
	}
	s := x.Serve(x.t, func(ctx context.Context, b *bus.Bus) error {
		x.ended <- serve(ctx, c, on, b, zerolog.New(zerolog.TestWriter{T: x.t}))
		return nil
	})
	bustest.Receive(x.t, "the announcement", announced)
	return s
}

// ask publishes the requests of a prompt, changed.
func (x *theatre) ask(uid schemas.UID, p schemas.Prompt, change func(*schemas.Request)) []*schemas.Request {
	x.t.Helper()
	policy, err := x.Bus.Policy(x.t.Context(), schemas.Lane("synthetic").Of(""))
	if err != nil {
		x.t.Fatal(err)
	}
	p.UID, p.Prompt, p.Seed, p.NumInferenceSteps, p.Height, p.Width = uid, "a red fox", new(int64(5)), new(int64(4)),
		new(int64(64)), new(int64(64))
	if p.GroupSize == nil && p.Tree == nil {
		p.GroupSize = new(int64(1))
	}
	p.Rollout.SDEStepIndices = []int64{1, 2}
	requests, err := intake.Resolve("r", &p, policy, intake.Origin{Seq: 1, Created: time.Now()})
	if err != nil {
		x.t.Fatal(err)
	}
	for _, r := range slices.Backward(requests) { // children of trees before their parents
		if change != nil {
			change(r)
		}
		x.publish(r)
	}
	return requests
}

func (x *theatre) publish(e schemas.Keyed) {
	x.t.Helper()
	if _, err := x.Bus.Publish(x.t.Context(), e); err != nil {
		x.t.Fatal(err)
	}
}

// made waits for the trajectories of a group.
func (x *theatre) made(uid schemas.UID, n int) (out []*schemas.Trajectory) {
	x.t.Helper()
	for _, m := range bustest.Await(x.t, x.Bus, n, schemas.StreamTrajectories, schemas.TrajectoryFilter("r", uid)) {
		out = append(out, bustest.Decode[schemas.Trajectory](x.t, m))
	}
	slices.SortFunc(out, func(a, b *schemas.Trajectory) int { return int(a.SampleIndex - b.SampleIndex) })
	return out
}

func (x *theatre) none(uid schemas.UID, why string) {
	x.t.Helper()
	if found, err := x.Bus.Subjects(x.t.Context(), schemas.StreamTrajectories,
		schemas.TrajectoryFilter("r", uid)); err != nil || len(found) > 0 {
		x.t.Errorf("%s: %v stored, %v", why, found, err)
	}
}

// Requests become trajectories, once each; what is asked again is acknowledged, and what cannot be made yet is put
// back.
func TestService_Requests(t *testing.T) {
	t.Parallel()
	x := open(t, nil)
	x.serve()
	tree := &schemas.Tree{Branches: []schemas.BranchPoint{{StepIndex: 2, Width: 2}}}
	x.ask("tree", schemas.Prompt{ImageSettings: schemas.ImageSettings{Tree: tree}}, nil)
	x.ask("young", schemas.Prompt{}, func(r *schemas.Request) { r.MinPolicyVersion = 9 })
	x.ask("other", schemas.Prompt{}, func(r *schemas.Request) { r.BaseDigest = strings.Repeat("0", 64) })
	pruned := 1e9
	x.ask("pruned", schemas.Prompt{},
		func(r *schemas.Request) { r.Prune = &schemas.Prune{StepIndex: 2, LogProbBelow: &pruned} })
	first := x.ask("twice", schemas.Prompt{GroupSize: new(int64(2))},
		func(r *schemas.Request) { r.ReturnConditioning = true })
	for _, made := range x.made("twice", 2) {
		if made.StopReason != schemas.StopCompleted || len(made.Steps) != 4 || len(made.Media) == 0 ||
			len(made.Conditioning) == 0 || made.CFGRule == "" {
			t.Errorf("%+v", made)
		}
	}
	subject := schemas.RequestSubject("r", "synthetic", "twice", 0, schemas.StageMain)
	bustest.Free(t, x.Bus, schemas.StreamRequests, subject)
	calls := x.model.calls.Load()
	for i, leaf := range x.made("tree", 2) {
		if leaf.StopReason != schemas.StopCompleted || i > 0 && (leaf.Start == nil || len(leaf.Steps) != 2) {
			t.Errorf("leaf %d: %+v", i, leaf)
		}
	}
	if made := x.made("pruned", 1)[0]; made.StopReason != schemas.StopPruned || len(made.Steps) != 2 ||
		len(made.Media) > 0 {
		t.Errorf("pruned: %+v", made)
	}
	if _, err := x.Bus.PublishRaw(t.Context(), subject, bustest.Encode(t, first[0]), nil, "again"); err != nil {
		t.Fatal(err)
	}
	bustest.Free(t, x.Bus, schemas.StreamRequests, subject)
	if again := x.model.calls.Load(); again-calls > 40 {
		t.Errorf("%d evaluations for a sample that is made", again-calls)
	}
	x.none("young", "of weights that are not there yet")
	x.none("other", "of another checkpoint")
	bustest.Until(t, "the note of the other checkpoint", func() error {
		var notes []string
		for _, say := range x.notes {
			notes = append(notes, say()...)
		}
		if len(notes) != 1 || !strings.Contains(notes[0], "wait for a sampler of the checkpoint 0000") {
			return errors.New(strings.Join(notes, "; "))
		}
		return nil
	})
}

// What cannot be made is a failed trajectory and a dead letter; what failed goes on from its checkpoint.
func TestService_Failures(t *testing.T) {
	t.Parallel()
	var fault atomic.Pointer[error]
	x := open(t, func(int64) error {
		if err := fault.Load(); err != nil {
			return *err
		}
		return nil
	})
	x.serve()
	set := func(err error) { fault.Store(&err) }
	set(bus.Terminal(schemas.CodeFailed, errors.New("the model is broken")))
	x.ask("broken", schemas.Prompt{}, nil)
	if made := x.made("broken", 1)[0]; made.StopReason != schemas.StopFailed ||
		!strings.Contains(made.Error, "the model is broken") {
		t.Errorf("%+v", made)
	}
	bustest.Dead(t, x.Bus, 1)
	calls, failed := x.model.calls.Load(), false
	x.model.before = nil
	fault.Store(nil)
	x.model.before = func(call int64) error {
		if call == calls+4 || call == calls+5 { // the last step, and the same row tried alone
			failed = true
			return errors.New("out of memory")
		}
		return nil
	}
	x.ask("resumed", schemas.Prompt{ImageSettings: schemas.ImageSettings{TrueCFGScale: new(1.0)}},
		func(r *schemas.Request) { r.ReturnStepIndices, r.CheckpointStepIndices = []int64{}, []int64{1, 2, 3} })
	if made := x.made("resumed", 1)[0]; !failed || made.StopReason != schemas.StopCompleted ||
		len(made.Attempts()) != 2 {
		t.Errorf("attempts %q, failed %v: %+v", made.Attempts(), failed, made)
	}
}

// A paused run's requests are parked, a cancelled group's are acknowledged.
func TestService_Controls(t *testing.T) {
	t.Parallel()
	x := open(t, nil)
	x.serve()
	hold := func(c *schemas.Control, seq uint64) {
		c.Run, c.By, c.At, c.Seq, c.Stored = "r", "test", 1, seq, 1
		if _, _, err := x.Bus.PutControl(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	hold(&schemas.Control{Action: schemas.ControlCancel, UID: "gone"}, 1)
	x.obeyed(1)
	x.ask("gone", schemas.Prompt{}, nil)
	bustest.Free(t, x.Bus, schemas.StreamRequests, schemas.RequestSubject("r", "synthetic", "gone", 0,
		schemas.StageMain))
	x.none("gone", "of a cancelled group")
	hold(&schemas.Control{Action: schemas.ControlPause}, 2)
	x.obeyed(2)
	x.ask("parked", schemas.Prompt{}, nil)
	bustest.Await(t, x.Bus, 1, schemas.StreamParked, schemas.ParkedSubject("r", "synthetic", "parked", 0,
		schemas.StageMain))
	x.none("parked", "of a paused run")
}

// obeyed waits until the presence says that a control is obeyed.
func (x *theatre) obeyed(seq uint64) {
	x.t.Helper()
	bustest.Until(x.t, "the control is obeyed", func() error {
		present, err := x.Bus.Present(x.t.Context())
		if err == nil && (len(present) != 1 || present[0].Controls < seq) {
			err = errors.New("not yet")
		}
		return err
	})
}

// The last device that is lost ends the service.
func TestService_DeviceLost(t *testing.T) {
	t.Parallel()
	x := open(t, func(int64) error { return tensor.ErrDeviceLost })
	x.model.before = nil
	x.serve()
	x.model.before = func(int64) error { return tensor.ErrDeviceLost }
	x.ask("g", schemas.Prompt{}, nil)
	if err := bustest.Receive(t, "the end", x.ended); !errors.Is(err, tensor.ErrDeviceLost) {
		t.Error(err)
	}
	x.none("g", "of a lost device")
}

// A lost device keeps the others from no version, whatever finds the loss: they take it, and make the samples. Without
// any, the sampler ends although it is asked for no samples.
func TestService_VersionsBesideALostDevice(t *testing.T) {
	t.Parallel()
	var lost, second atomic.Bool
	dies := func(dead *atomic.Bool) func(int64) error {
		return func(int64) error {
			if dead.Load() {
				return tensor.ErrDeviceLost
			}
			return nil
		}
	}
	x := open(t, dies(&lost))
	x.second = &scripted{Model: x.model.Model, before: dies(&second)}
	x.serve()
	lost.Store(true)
	x.push("")
	x.takes(1)
	calls := x.model.calls.Load()
	x.ask("g", schemas.Prompt{GroupSize: new(int64(4))}, nil)
	for _, made := range x.made("g", 4) {
		if made.StopReason != schemas.StopCompleted || made.PolicyVersionMin != 1 {
			t.Errorf("%+v", made)
		}
	}
	if n := x.model.calls.Load() - calls; n > 0 {
		t.Errorf("%d evaluations on the lost device", n)
	}
	second.Store(true)
	x.push("")
	if err := bustest.Receive(t, "the end", x.ended); !errors.Is(err, tensor.ErrDeviceLost) {
		t.Error(err)
	}
}

// push announces the next version, of the same weights, with a rule.
func (x *theatre) push(rule string) {
	p, err := x.Bus.Policy(x.t.Context(), schemas.Lane("synthetic").Of(""))
	if err == nil {
		next := *p
		next.PolicyVersion, next.Parent, next.By, next.Rule = p.PolicyVersion+1, &p.PolicyVersion, "test", rule
		err = x.Bus.SetPolicy(x.t.Context(), &next, p)
	}
	if err != nil {
		x.t.Error(err)
	}
}

// takes waits until the sampler has taken a version over.
func (x *theatre) takes(version int64) {
	bustest.Until(x.t, fmt.Sprintf("version %d", version), func() error {
		all, err := x.Bus.Applied(x.t.Context(), schemas.Lane("synthetic").Of(""))
		if err == nil && !slices.ContainsFunc(all, func(a *schemas.Applied) bool {
			return a.PolicyVersion == version && a.State == schemas.AppliedApplied
		}) {
			err = fmt.Errorf("not yet: %+v", all)
		}
		return err
	})
}

// A sample whose device has not got the newest version, as it was found lost, ends with the weights that it has, or
// begins again elsewhere: the rule of the version says which.
func TestService_SampleOnADeviceWithoutTheVersion(t *testing.T) {
	t.Parallel()
	for rule, want := range map[string]int64{schemas.SwapSwitch: 0, schemas.SwapRestart: 1} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			x := open(t, nil)
			var lost atomic.Bool
			var begun atomic.Int64
			x.model.before = func(int64) error {
				if lost.Load() {
					return tensor.ErrDeviceLost
				}
				if begun.Add(1) == 4 { // after the two canaries of the start, and one step
					lost.Store(true)
					x.push(rule)
					x.takes(1)
					lost.Store(false) // of what is in hand, the device makes the rest
				}
				return nil
			}
			x.second = &scripted{Model: x.model.Model}
			x.serve()
			x.ask("g", schemas.Prompt{ImageSettings: schemas.ImageSettings{TrueCFGScale: new(1.0)}}, nil)
			made := x.made("g", 1)[0]
			if made.StopReason != schemas.StopCompleted || made.PolicyVersionMin != want ||
				made.PolicyVersionMax != want {
				t.Errorf("versions %d to %d, want %d: %+v", made.PolicyVersionMin, made.PolicyVersionMax, want, made)
			}
			if begun.Load() < 4 {
				t.Errorf("%d evaluations: no version was pushed on the way", begun.Load())
			}
		})
	}
}

// A sampler that starts again keeps the lane's version; newer weights that cannot be loaded are refused, those that can
// be are used, and samples begin again with them where their rule says so.
func TestService_Policies(t *testing.T) {
	t.Parallel()
	x := open(t, nil)
	x.serve().Stop()
	x.serve()
	push := func(change func(*schemas.Policy)) {
		p, err := x.Bus.Policy(t.Context(), schemas.Lane("synthetic").Of(""))
		if err != nil {
			t.Fatal(err)
		}
		next := *p
		next.PolicyVersion, next.Parent, next.By = p.PolicyVersion+1, &p.PolicyVersion, "test"
		change(&next)
		if err := x.Bus.SetPolicy(t.Context(), &next, p); err != nil {
			t.Fatal(err)
		}
	}
	answered := func(version int64, state string) {
		bustest.Until(t, state, func() error {
			all, err := x.Bus.Applied(t.Context(), schemas.Lane("synthetic").Of(""))
			if err == nil && !slices.ContainsFunc(all,
				func(a *schemas.Applied) bool { return a.PolicyVersion == version && a.State == state }) {
				err = fmt.Errorf("not yet: %+v", all)
			}
			return err
		})
	}
	push(func(p *schemas.Policy) {
		if p.PolicyVersion != 1 {
			t.Errorf("version %d after a restart with the same files", p.PolicyVersion-1)
		}
		p.WeightsDigest, p.Weights = strings.Repeat("1", 64),
			[]schemas.WeightsFile{{Bucket: schemas.BlobBucket, Digest: strings.Repeat("2", 64), Size: 8}}
	})
	answered(1, schemas.AppliedRefused)
	for i, rule := range []string{schemas.SwapRestart, schemas.SwapSwitch} {
		version := int64(2 + i)
		begun := x.model.calls.Load()
		x.model.before = func(call int64) error {
			if call == begun+3 {
				push(func(p *schemas.Policy) {
					p.WeightsDigest, p.Weights, p.Rule = x.model.Card().WeightsDigest, nil, rule
				})
				answered(version, schemas.AppliedApplied)
			}
			return nil
		}
		x.ask(schemas.UID(rule), schemas.Prompt{ImageSettings: schemas.ImageSettings{TrueCFGScale: new(1.0)}}, nil)
		made := x.made(schemas.UID(rule), 1)[0]
		if made.PolicyVersionMax != version || (made.PolicyVersionMin == version) != (rule == schemas.SwapRestart) {
			t.Errorf("%s: versions %d to %d, want %d", rule, made.PolicyVersionMin, made.PolicyVersionMax, version)
		}
	}
}

// A sample whose tenant is removed while it is made ends with the weights that it began with.
func TestService_TenantRemoved(t *testing.T) {
	t.Parallel()
	x := open(t, nil)
	x.serve()
	of := schemas.Lane("synthetic").Of("alice")
	served := func(tenants int) {
		bustest.Until(t, "the tenants of the sampler", func() error {
			all, err := x.Bus.Present(t.Context())
			if err == nil && (len(all) != 1 || len(all[0].Tenants) != tenants) {
				err = fmt.Errorf("not yet: %+v", all)
			}
			return err
		})
	}
	p, err := x.Bus.Policy(t.Context(), of.Lane.Of(""))
	if err == nil {
		p.Tenant = of.Tenant
		err = x.Bus.SetPolicy(t.Context(), p, nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	served(1)
	begun := x.model.calls.Load()
	x.model.before = func(call int64) error {
		if call == begun+2 {
			if _, err := x.Bus.RemoveTenant(t.Context(), of); err != nil {
				t.Error(err)
			}
			served(0)
		}
		return nil
	}
	x.ask("g", schemas.Prompt{ImageSettings: schemas.ImageSettings{TrueCFGScale: new(1.0)}},
		func(r *schemas.Request) { r.Tenant = of.Tenant })
	made := x.made("g", 1)[0]
	if made.StopReason != schemas.StopCompleted || made.Tenant != of.Tenant || x.model.calls.Load() < begun+4 {
		t.Errorf("%+v", made)
	}
}

// A network is what its kind says, and changes only where it can.
func TestNetwork_Kinds(t *testing.T) {
	t.Parallel()
	x := open(t, nil)
	n := engine.Network(&images.Network{Model: x.model})
	if same, err := n.With(t.Context(), engine.Change{}); same != n || err != nil {
		t.Errorf("%v, %v", same, err)
	}
	if _, err := n.With(t.Context(), engine.Change{Full: nil, Adapters: nil, Digest: "x"}); err != nil {
		t.Error(err)
	}
}
