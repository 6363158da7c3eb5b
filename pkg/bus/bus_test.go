package bus_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/schemas"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// transports are the two ways to a server; every behaviour holds over both.
var transports = []string{"in-process", "tcp"}

// eachTransport runs a test over every transport, with a fresh server and streams.
func eachTransport(t *testing.T, test func(t *testing.T, e *env)) {
	t.Helper()
	for _, transport := range transports {
		t.Run(transport, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, transport)
			e.setup(t)
			test(t, e)
		})
	}
}

// env is a server on a store of its own and a bus connected to it.
type env struct {
	*bus.Bus
	server    *natsd.Server
	transport string
	options   natsd.Options
}

func newEnv(t testing.TB, transport string, change ...func(*natsd.Options)) *env {
	t.Helper()
	e := &env{transport: transport, options: natsd.Options{StoreDir: t.TempDir(), SyncInterval: time.Minute, Log: testLog(t)}}
	if transport == "tcp" {
		e.options.Listen = "127.0.0.1:0"
	}
	for _, f := range change {
		f(&e.options)
	}
	e.start(t)
	e.Bus = e.connect(t)
	return e
}

func testLog(t testing.TB) zerolog.Logger {
	t.Helper()
	if testing.Verbose() {
		return zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.InfoLevel)
	}
	return zerolog.Nop()
}

func (e *env) start(t testing.TB) {
	t.Helper()
	server, err := natsd.Start(context.Background(), e.options)
	if err != nil {
		t.Fatal(err)
	}
	e.server = server
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	})
}

func (e *env) setup(t testing.TB) {
	t.Helper()
	if err := e.Setup(context.Background()); err != nil {
		t.Fatal(err)
	}
}

func (e *env) config() bus.Config {
	if e.transport == "tcp" {
		return bus.Config{Name: "test", URL: e.server.ClientURL(), Token: e.options.Token}
	}
	return bus.Config{Name: "test", InProcess: e.server.InProcess()}
}

// connect makes another bus to the same server.
func (e *env) connect(t testing.TB) *bus.Bus {
	t.Helper()
	b, err := bus.Connect(context.Background(), e.config(), testLog(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// resize changes the limits of a stream, to fill it quickly.
func (e *env) resize(t testing.TB, stream string, maxBytes, maxMsgs int64) {
	t.Helper()
	s, err := e.JetStream().Stream(context.Background(), stream)
	if err != nil {
		t.Fatal(err)
	}
	c := s.CachedInfo().Config
	c.MaxBytes, c.MaxMsgs = maxBytes, maxMsgs
	if _, err := e.JetStream().UpdateStream(context.Background(), c); err != nil {
		t.Fatal(err)
	}
}

func (e *env) info(t testing.TB, stream string) *jetstream.StreamInfo {
	t.Helper()
	s, err := e.JetStream().Stream(context.Background(), stream)
	if err != nil {
		t.Fatal(err)
	}
	return s.CachedInfo()
}

// patience is how long a test waits, at least: the machine may be busy elsewhere, and a test
// that passes does not wait.
const patience = time.Minute

// eventually polls until the condition holds.
func eventually(t testing.TB, what string, within time.Duration, condition func() bool) {
	t.Helper()
	within = max(within, patience)
	for deadline := time.Now().Add(within); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if condition() {
			return
		}
	}
	t.Fatalf("%s: not within %v", what, within)
}

var digest = strings.Repeat("0", 64)

// group is what events of a group without a batch carry.
func group(uid string) schemas.Group {
	return schemas.Group{Batch: uid, Reward: []schemas.RewardSpec{}, Advantage: schemas.AdvantageSpec{Estimator: "flow_grpo"}}
}

func request(run, uid string, sample int64) *schemas.Request {
	return &schemas.Request{
		Run: run, UID: uid, SampleIndex: sample, GroupSize: schemas.MaxGroupSize, Lane: "tiny", Prompt: "a red fox", Height: 16, Width: 16,
		Sigmas: []float32{1, 0}, Transitions: []string{"ode"}, LogProbKind: "density", Solver: "euler", LatentsDType: "F32",
		ScheduleDigest: digest, Group: group(uid),
	}
}

func trajectory(uid string, sample int64) *schemas.Trajectory {
	return &schemas.Trajectory{
		Run: "r1", UID: uid, SampleIndex: sample, GroupSize: schemas.MaxGroupSize, Lane: "tiny", Attempt: "a1",
		StopReason: "failed", Error: "out of paint", Group: group(uid),
	}
}

func reward(uid string, sample int64) *schemas.Reward {
	return &schemas.Reward{
		Run: "r1", UID: uid, SampleIndex: sample, GroupSize: schemas.MaxGroupSize, Status: "failed", Error: "out of paint",
		Scores: []schemas.Score{}, Group: group(uid),
	}
}

// step has one latent of n bytes.
func step(uid string, sample int64, attempt string, index int64, n int) *schemas.Step {
	data := make([]byte, n)
	for i := range data {
		data[i] = byte(i*7 + i>>8 + int(index))
	}
	return &schemas.Step{
		Run: "r1", UID: uid, SampleIndex: sample, Attempt: attempt, StepIndex: index, NumInferenceSteps: 1000,
		Transition: "ode", Sigma: 0.5, SigmaNext: 0.4, Timestep: 500, LogProbKind: "density", ElementCount: int64(n),
		Latents: []schemas.IndexedTensor{{Index: index, Tensor: schemas.Tensor{DType: "U8", Shape: []int64{int64(n), 1}, Data: data}}},
		Debug:   []schemas.NamedTensor{}, ScheduleDigest: strings.Repeat("0", 64), WeightsDigest: strings.Repeat("1", 64), Sampler: "s1", Backend: "cpu",
	}
}

func uid(i int) string { return fmt.Sprintf("u%d", i) }
