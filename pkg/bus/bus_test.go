package bus_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// transports are the two ways to a server; every behaviour holds over both.
var transports = []string{"in-process", "tcp"}

// eachTransport runs a test over every transport, with a fresh server and streams. Under the race detector it leaves
// out the one that the tests of the services have.
func eachTransport(t *testing.T, test func(t *testing.T, e *env)) {
	t.Helper()
	t.Parallel()
	for _, transport := range transports {
		if bustest.Race && transport != "tcp" {
			continue
		}
		t.Run(transport, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, transport)
			e.setup(t)
			test(t, e)
		})
	}
}

// env is an event plane that is reached in one of the ways.
type env struct{ *bustest.Plane }

// newEnv is a server without streams, which a test sets up.
func newEnv(t testing.TB, transport string, change ...func(*natsd.Options)) *env {
	t.Helper()
	change = append([]func(*natsd.Options){func(o *natsd.Options) { o.SyncInterval = time.Minute }}, change...)
	if transport == "tcp" {
		change = append(change, bustest.TCP)
	}
	return &env{bustest.Bare(t, change...)}
}

// Who does not want to wait for a server hears at once that there is none.
func TestConnect_NoWait(t *testing.T) {
	for _, url := range []string{
		"nats://127.0.0.1:1", "nats://127.0.0.1:1,nats://127.0.0.1:2",
		"nats://nowhere.invalid:4222",
	} {
		b, err := bus.Connect(t.Context(), bus.Config{URL: url, ConnectTimeout: -1, NoWait: true}, zerolog.Nop())
		if err == nil {
			t.Errorf("%s: connected; want an error", url)
			_ = b.Close()
		}
	}
}

func (e *env) setup(t testing.TB) {
	t.Helper()
	if err := e.Setup(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// resize changes the limits of a stream, to fill it quickly.
func (e *env) resize(t testing.TB, stream string, maxBytes, maxMsgs int64) {
	t.Helper()
	e.Change(t, stream, func(c *jetstream.StreamConfig) { c.MaxBytes, c.MaxMsgs = maxBytes, maxMsgs })
}

// eventually waits until the condition holds.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	bustest.Until(t, what, func() error {
		if !condition() {
			return errors.New("not yet")
		}
		return nil
	})
}

var digest = strings.Repeat("0", 64)

// group is what events of a group without a batch carry.
func group(uid schemas.UID) schemas.Group {
	return schemas.Group{
		Batch: string(uid), Reward: []schemas.RewardSpec{}, Advantage: schemas.AdvantageSpec{Estimator: "flow_grpo"},
	}
}

func request(run schemas.Run, uid schemas.UID, sample int64) *schemas.Request {
	return &schemas.Request{
		Identity: schemas.Identity{Stage: schemas.StageMain, Run: run, UID: uid, SampleIndex: sample, GroupSize: schemas.MaxGroupSize, Lane: "tiny"},
		Sampling: schemas.Sampling{
			Prompt: "a red fox", Height: 16, Width: 16,
			Sigmas: []float32{1, 0}, Transitions: []string{"ode"}, LogProbKind: "density", Solver: "euler", LatentsDType: "F32",
		},
		ScheduleDigest: digest, Group: group(uid),
	}
}

func trajectory(uid schemas.UID, sample int64) *schemas.Trajectory {
	return &schemas.Trajectory{
		Identity:   schemas.Identity{Stage: schemas.StageMain, Run: "r1", UID: uid, SampleIndex: sample, GroupSize: schemas.MaxGroupSize, Lane: "tiny"},
		Provenance: schemas.Provenance{Attempt: "a1"},
		Outcome:    schemas.Outcome{StopReason: "failed", Error: "out of paint"},
		Group:      group(uid),
	}
}

func reward(uid schemas.UID, sample int64) *schemas.Reward {
	return &schemas.Reward{
		Run: "r1", UID: uid, SampleIndex: sample, GroupSize: schemas.MaxGroupSize, Status: "failed", Error: "out of paint",
		Scores: []schemas.Score{}, Group: group(uid),
	}
}

// step has one latent of n bytes.
func step(uid schemas.UID, sample int64, attempt string, index int64, n int) *schemas.Step {
	data := make([]byte, n)
	for i := range data {
		data[i] = byte(i*7 + i>>8 + int(index))
	}
	return &schemas.Step{
		Stage: schemas.StageMain,
		Run:   "r1", UID: uid, SampleIndex: sample, Attempt: attempt, StepIndex: index, NumInferenceSteps: 1000,
		Transition: "ode", Sigma: 0.5, SigmaNext: 0.4, Timestep: 500, LogProbKind: "density", ElementCount: int64(n),
		Latents: []schemas.IndexedTensor{{Index: index, Tensor: schemas.Tensor{DType: "U8", Shape: []int64{int64(n), 1}, Data: data}}},
		Debug:   []schemas.NamedTensor{}, ScheduleDigest: strings.Repeat("0", 64), WeightsDigest: strings.Repeat("1", 64), Sampler: "s1", Backend: "cpu",
	}
}

func uid(i int) schemas.UID { return schemas.UID(fmt.Sprintf("u%d", i)) }
