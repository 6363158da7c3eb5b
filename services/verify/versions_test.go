package verify_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/model/families"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
	"github.com/meander-rl/meander/pkg/models/safetensors"
	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
	"github.com/meander-rl/meander/services/verify"
)

// studio makes runs whose samples have pushed versions of whole networks.
type studio struct {
	*bustest.Plane
	t       *testing.T
	peer    *client.Client
	service *bustest.Service
	tensor  string // the one that is pushed
	shape   []int
	pushed  int
}

// newStudio serves a model.
func newStudio(t *testing.T, tensor string, shape []int, change func(*pipeline.Config)) *studio {
	t.Helper()
	plane := bustest.New(t)
	config := pipeline.DefaultConfig()
	change(&config)
	s := plane.Serve(t, func(ctx context.Context, b *bus.Bus) error {
		return pipeline.Run(ctx, b, config, zerolog.Nop())
	})
	return &studio{plane, t, client.New(plane.Bus), s, tensor, shape, 0}
}

// push makes another network the next version, to which samples switch, and waits until the sampler has it.
func (x *studio) push() {
	x.t.Helper()
	x.pushed++
	n := 1
	for _, d := range x.shape {
		n *= d
	}
	values := make([]float32, n)
	for i := range values {
		values[i] = float32(x.pushed) / 64
	}
	var file bytes.Buffer
	of, err := safetensors.FloatTensor(x.tensor, tensor.F32, x.shape, values)
	err = errors.Join(err, safetensors.Write(&file, []safetensors.Tensor{of}, nil))
	var full *lora.Full
	if err == nil {
		full, err = lora.ParseFull(file.Bytes())
	}
	var p *schemas.Policy
	if err == nil {
		p, err = x.peer.PushWeights(x.t.Context(), full, client.Push{Rule: schemas.SwapSwitch})
	}
	var replicas []client.Replica
	if err == nil {
		replicas, err = x.peer.AwaitPolicy(x.t.Context(), p)
	}
	if err != nil || len(replicas) != 1 || replicas[0].Answer == nil ||
		replicas[0].Answer.State != schemas.AppliedApplied {
		x.t.Errorf("version %d: %+v, %v", x.pushed, replicas, err)
	}
}

// sample makes one of run r with six steps, of which four are stochastic.
func (x *studio) sample(uid schemas.UID, rewards ...schemas.RewardSpec) *schemas.Trajectory {
	x.t.Helper()
	if _, err := x.peer.Publish(x.t.Context(), "r", &schemas.Prompt{
		UID: uid, Prompt: "red", Seed: new(int64(5)), GroupSize: new(int64(1)), Reward: rewards,
		ImageSettings: schemas.ImageSettings{
			NumInferenceSteps: new(int64(6)), Height: new(int64(64)), Width: new(int64(64)), TrueCFGScale: new(1.0),
			Rollout: schemas.Rollout{SDEStepIndices: []int64{1, 2, 3, 4}},
		},
	}); err != nil {
		x.t.Fatal(err)
	}
	bustest.Await(x.t, x.Bus, 1, schemas.StreamAdvantages, schemas.AdvantageSubject("r", uid))
	trajectory, err := x.peer.Trajectory(x.t.Context(), "r", uid, 0)
	if err != nil {
		x.t.Fatal(err)
	}
	return trajectory
}

// proves fails the test unless all stochastic steps of so many samples are found again.
func (x *studio) proves(samples int, o verify.Options) {
	x.t.Helper()
	report, err := verify.Run(x.t.Context(), x.Bus, "r", o)
	if err != nil || !report.OK(0) || report.MaxRatio != 0 || report.Steps != 4*samples {
		x.t.Errorf("%+v, %v", report, err)
	}
}

const sd3 = "StableDiffusion3Pipeline"

// byWorkers is a studio of a model that a worker computes, and another worker for verify, with room for two networks.
func byWorkers(t *testing.T) (x *studio, sampling, verifying *remotetest.Worker, o verify.Options) {
	t.Helper()
	dir := remotetest.Folder(t, sd3, 1)
	sampling, at := remotetest.Start(t, remotetest.Options{Dir: dir, Deterministic: true, MaxWhole: 2})
	verifying, address := remotetest.Start(t, remotetest.Options{Dir: dir, Deterministic: true, MaxWhole: 2})
	x = newStudio(t, "proj.weight", []int{remotetest.Channels, remotetest.Channels}, func(c *pipeline.Config) {
		c.Sampler.Model, c.Sampler.Engine = dir, "torch="+at
	})
	return x, sampling, verifying, verify.Options{Model: []string{dir}, Engine: "torch=" + address}
}

// A worker has room for two networks, and a run has more: each is there when its samples are computed.
func TestRun_WholeVersions(t *testing.T) {
	t.Parallel()
	x, _, verifying, o := byWorkers(t)
	x.sample("0")
	for i := range 4 {
		x.push()
		x.sample(schemas.UID(fmt.Sprint(i + 1)))
	}
	x.proves(5, o)
	if n := verifying.Loaded(); n != 0 {
		t.Errorf("%d networks are in the worker afterwards", n)
	}
}

// A sample that went on with newer weights again and again is computed with the weights of each step; those of its last
// step stay until then.
func TestRun_VersionsOfOneSample(t *testing.T) {
	t.Parallel()
	x, sampling, _, o := byWorkers(t)
	x.sample("before")
	var play remotetest.Play
	play = remotetest.Before(func() { // in a step, and not for the canary of what is pushed
		if x.push(); x.pushed < 4 {
			sampling.Play("velocity", play)
		}
	})
	sampling.Play("velocity", play)
	if tr := x.sample("moves"); tr.PolicyVersionMin != 0 || tr.PolicyVersionMax != 4 {
		t.Errorf("made with the versions %d to %d; want 0 to 4", tr.PolicyVersionMin, tr.PolicyVersionMax)
	}
	x.proves(2, o)
}

// changeable is a network that this program computes, with one weight that is added to its output. It says when it is
// used after it was closed.
type changeable struct {
	model.Model
	script *stage
	digest string
	weight float32
	closed atomic.Bool
}

// stage calls before at each evaluation, unless it is in such a call already.
type stage struct {
	before atomic.Pointer[func()]
	inside atomic.Bool
	late   atomic.Int64 // evaluations of what was closed
}

var checkpointDigest = strings.Repeat("c", 64)

// family returns the family of the network.
func (s *stage) family() model.Registry {
	_, f, err := families.All().Find("synthetic")
	if err != nil {
		panic(err) // it needs no folder
	}
	return model.Registry{{
		Name: "changeable",
		Open: func(dir string, o model.Options) (model.Model, error) {
			m, err := f.Open(dir, o)
			return &changeable{Model: m, script: s, digest: checkpointDigest}, err
		},
		Inspect: f.Inspect,
	}}
}

func (m *changeable) Card() model.Card {
	c := m.Model.Card()
	c.Name, c.Family, c.WeightsDigest = "changeable", "changeable", m.digest
	return c
}

func (m *changeable) BaseDigest() string { return checkpointDigest }

func (m *changeable) Modules() lora.Table { return lora.Table{"w": {1, 1}} }

func (m *changeable) Tensors() lora.Shapes { return lora.Shapes{"w.weight": {1, 1}} }

func (m *changeable) Adapted(...lora.Weighted) (model.Model, error) { return m, nil }

func (m *changeable) Replaced(full *lora.Full, digest string) (model.Model, error) {
	w, err := full.Archive().Floats("w.weight")
	if err != nil {
		return nil, err
	}
	return &changeable{Model: m.Model, script: m.script, digest: digest, weight: w[0]}, nil
}

func (m *changeable) Velocity(ctx context.Context, rows []model.Row, size model.Size) error {
	if m.closed.Load() {
		m.script.late.Add(1)
	}
	if before := m.script.before.Load(); before != nil && m.script.inside.CompareAndSwap(false, true) {
		(*before)()
		m.script.inside.Store(false)
	}
	if err := m.Model.Velocity(ctx, rows, size); err != nil {
		return err
	}
	for _, r := range rows {
		for i := range r.Dst {
			r.Dst[i] += m.weight
		}
	}
	return nil
}

func (m *changeable) Close() error {
	m.closed.Store(true)
	return nil
}

// No network is used once it is closed, however many versions a sample has.
func TestRun_ClosesNoVersionInUse(t *testing.T) {
	t.Parallel()
	script := &stage{}
	x := newStudio(t, "w.weight", []int{1, 1}, func(c *pipeline.Config) {
		c.Sampler.Model, c.Sampler.Models = "changeable", script.family()
	})
	x.sample("before")
	push := func() {
		if x.pushed < 4 {
			x.push()
		}
	}
	script.before.Store(&push)
	if tr := x.sample("moves"); tr.PolicyVersionMax != 4 {
		t.Errorf("made with the versions %d to %d; want 0 to 4", tr.PolicyVersionMin, tr.PolicyVersionMax)
	}
	script.before.Store(nil)
	x.proves(2, verify.Options{Models: script.family()})
	if n := script.late.Load(); n > 0 {
		t.Errorf("%d evaluations of a network that was closed", n)
	}
}

// Weights that the model cannot load, at first or once more, and a model that is lost, say nothing about the samples:
// they end verify, and are no mismatches.
func TestRun_WeightsNotLoaded(t *testing.T) {
	t.Parallel()
	x, _, verifying, o := byWorkers(t)
	x.sample("before")
	x.push()
	x.sample("one")
	o.UIDs = []schemas.UID{"one"}
	refused, pass := remotetest.Fail("weights", "no memory"), remotetest.Before(func() {})
	for name, c := range map[string]struct {
		load, velocity []remotetest.Play
		want           string
	}{
		"at first": {
			[]remotetest.Play{refused},
			nil,
			"the weights of version 1 cannot be loaded: weights: worker: weights: no memory",
		},
		"once more": {
			[]remotetest.Play{pass, refused},
			[]remotetest.Play{remotetest.Fail("weights", "not loaded")},
			"the weights of version 1 cannot be loaded: ",
		},
	} {
		verifying.Play("load", c.load...)
		verifying.Play("velocity", c.velocity...)
		report, err := verify.Run(t.Context(), x.Bus, "r", o)
		failed, ok := errors.AsType[*verify.WeightsError](err)
		if report != nil || !ok || failed.Version != 1 || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %+v, %v; want %q", name, report, err, c.want)
		}
	}
	verifying.Play("velocity", remotetest.Fail("config", "no such device"))
	if report, err := verify.Run(t.Context(), x.Bus, "r", o); report != nil || !errors.Is(err, tensor.ErrDeviceLost) {
		t.Errorf("a model that is lost: %+v, %v", report, err)
	}
	x.proves(1, o)
}

// Weights that are not those that were pushed are a mismatch.
func TestRun_OtherWeights(t *testing.T) {
	t.Parallel()
	x, _, verifying, o := byWorkers(t)
	x.sample("before")
	x.push()
	made := x.sample("one")
	x.service.Stop() // it would put away what is forged
	current, err := x.peer.NewestPolicy(t.Context(), schemas.Lineage{})
	if err != nil {
		t.Fatal(err)
	}
	next := *current
	next.PolicyVersion, next.Parent, next.WeightsDigest = 2, &current.PolicyVersion, strings.Repeat("f", 64)
	if err := x.Bus.SetPolicy(t.Context(), &next, current); err != nil {
		t.Fatal(err)
	}
	store(t, x.Bus, "forged", made, func(e *schemas.Trajectory) { e.WeightsDigest = next.WeightsDigest })
	report, err := verify.Run(t.Context(), x.Bus, "forged", o)
	if err != nil || report.OK(0) || !slices.ContainsFunc(report.Mismatches, func(m verify.Mismatch) bool {
		return strings.Contains(m.What, "version 2 has ")
	}) {
		t.Errorf("%+v, %v", report, err)
	}
	if n := verifying.Loaded(); n != 0 {
		t.Errorf("%d networks are in the worker afterwards", n)
	}
}
