package reward

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// plane is an event plane of a test.
type plane struct{ *bustest.Plane }

func newPlane(t testing.TB) *plane {
	t.Helper()
	return &plane{bustest.New(t)}
}

func testConfig() Config {
	c := DefaultConfig()
	c.ScorePatience = 3 * time.Second
	return c
}

// serve runs the service.
func (p *plane) serve(t testing.TB, cfg Config) *bustest.Service {
	t.Helper()
	return p.Serve(t, func(ctx context.Context, b *bus.Bus) error { return Run(ctx, cfg, b, zerolog.Nop()) })
}

// prompted is when the prompts of all tests came.
var prompted = time.Now()

// trajectory is a finished sample whose image is of one grey.
func trajectory(
	t testing.TB, run schemas.Run, uid schemas.UID, i, n int64, shade uint8, rewards ...string,
) *schemas.Trajectory {
	t.Helper()
	im := image.NewNRGBA(image.Rect(0, 0, 32, 16))
	for k := range im.Pix {
		im.Pix[k] = shade
		if k%4 == 3 {
			im.Pix[k] = 255
		}
	}
	im.Set(1, 1, color.NRGBA{uint8(i), 10, 20, 255})
	var file bytes.Buffer
	if err := png.Encode(&file, im); err != nil {
		t.Fatal(err)
	}
	digest := strings.Repeat("0123456789abcdef", 4)
	now := time.Now().UnixNano()
	tr := &schemas.Trajectory{
		Identity: schemas.Identity{Stage: schemas.StageMain, Run: run, UID: uid, SampleIndex: i, GroupSize: n, Lane: "lane"},
		Provenance: schemas.Provenance{
			Attempt:       "a",
			WeightsDigest: digest, Sampler: "s", Backend: "cpu",
			Timings: schemas.SampleTimings{Received: now, Started: now, Finished: now},
		},
		Outcome: schemas.Outcome{StopReason: schemas.StopCompleted},
		Sampling: schemas.Sampling{
			Prompt: `a sign that says "A"`, Height: 16, Width: 32, TrueCFGScale: 1,
			Sigmas: []float32{1, 0}, Transitions: []string{"sde"},
			LogProbKind: schemas.LogProbDensity, Solver: "euler", LatentsDType: "F32",
		},
		Denoised: schemas.Denoised{
			CFGRule:   schemas.CFGPlain,
			Timesteps: []float32{1000, 0}, LogProbs: []*float64{new(-1.5)},
			LatentStepIndices: []int64{}, LatentsShape: []int64{2, 64},
			Conditioning: []schemas.NamedTensor{},
		},
		Steps: []schemas.StepRef{{Seq: 1, Digest: digest}}, ContentDigest: digest,
		Media: []schemas.Medium{{
			Kind: schemas.KindImage, Format: schemas.ImagePNG, Width: 32, Height: 16, Digest: digest, Data: file.Bytes(),
		}},
		ScheduleDigest: digest,
		Group: schemas.Group{
			Batch: string(uid), PromptSeq: 1, Created: prompted.UnixNano(),
			Advantage: schemas.AdvantageSpec{
				Estimator: "flow_grpo", Std: "group", StdBasis: "sample", Epsilon: new(1e-4),
			},
		},
	}
	for _, name := range rewards {
		name, optional := strings.CutSuffix(name, "?")
		tr.Group.Reward = append(tr.Group.Reward,
			schemas.RewardSpec{Name: name, Weight: new(1.0), Required: new(!optional)})
	}
	if err := tr.Validate(); err != nil {
		t.Fatal(err)
	}
	return tr
}

func (p *plane) put(t testing.TB, events ...schemas.Keyed) {
	t.Helper()
	for _, e := range events {
		if tr, ok := e.(*schemas.Trajectory); ok && tr.StopReason == schemas.StopCompleted {
			p.putStep(t, tr)
		}
		if _, err := p.Publish(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
}

// putStep stores the one step of a trajectory, which then names it.
func (p *plane) putStep(t testing.TB, tr *schemas.Trajectory) {
	t.Helper()
	step := &schemas.Step{
		Stage: schemas.StageMain,
		Run:   tr.Run, UID: tr.UID, SampleIndex: tr.SampleIndex, Attempt: tr.Attempt, NumInferenceSteps: 1,
		Transition: "sde",
		Sigma:      1, Timestep: 1000, LogProbKind: tr.LogProbKind, LogProb: tr.LogProbs[0], LogProbSum: tr.LogProbs[0],
		ElementCount: 128,
		Latents:      []schemas.IndexedTensor{}, Debug: []schemas.NamedTensor{}, ScheduleDigest: tr.ScheduleDigest,
	}
	ack, err := p.Publish(t.Context(), step)
	if err != nil {
		t.Fatal(err)
	}
	data, err := schemas.Encode(step)
	if err != nil {
		t.Fatal(err)
	}
	tr.Steps = []schemas.StepRef{{Seq: ack.Seq, Digest: fmt.Sprintf("%x", sha256.Sum256(data))}}
}

// rewards waits until a run has n rewards, and returns them by uid and sample.
func (p *plane) rewards(t testing.TB, run schemas.Run, n int) map[string]*schemas.Reward {
	t.Helper()
	out := map[string]*schemas.Reward{}
	for _, m := range bustest.Await(t, p.Bus, n, schemas.StreamRewards, schemas.RewardFilter(run, "*", "*")) {
		r := bustest.Decode[schemas.Reward](t, m)
		out[fmt.Sprintf("%s.%d", r.UID, r.SampleIndex)] = r
	}
	return out
}

// handled waits until the service has seen what is stored by now: a plain sample that is
// stored after it has its reward.
func (p *plane) handled(t testing.TB) {
	t.Helper()
	uid := schemas.UID(fmt.Sprintf("after-%d", p.Info(t, schemas.StreamTrajectories).State.LastSeq))
	p.put(t, trajectory(t, "plain", uid, 0, 1, 7, "jpeg_compressibility"))
	bustest.Await(t, p.Bus, 1, schemas.StreamRewards, schemas.RewardFilter("plain", string(uid), uid))
}

// file writes a scorers file.
func file(t testing.TB, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "scorers.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// web answers score requests with what reply says for the number of samples.
func web(t testing.TB, reply func(w http.ResponseWriter, r *http.Request, samples int)) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body struct {
			Samples []json.RawMessage `json:"samples"`
		}
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			t.Errorf("request: %v", err)
		}
		reply(w, r, len(body.Samples))
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func scores(w http.ResponseWriter, value string, samples int) {
	fmt.Fprintf(w, `{"scores": [%s]}`, strings.TrimSuffix(strings.Repeat(value+",", samples), ","))
}
