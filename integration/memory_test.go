package integration_test

import (
	"bytes"
	"fmt"
	"image"
	"image/png"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// measuresHeap skips under the race detector, which keeps memory of its own and makes these runs many times longer.
func measuresHeap(t *testing.T) {
	t.Helper()
	if raceEnabled {
		t.Skip("the race detector takes memory of its own; it runs without")
	}
}

// beside is what the reward service may have in use beside its images, in MiB, as ARCHITECTURE.md says.
const beside = 64

// However many samples have large images, and however many are scored at once, the
// reward service stays below its ceiling; what is above it by itself fails by name.
// A soak takes the largest images that an event may have.
func TestMemory_RewardStaysBelowItsCeiling(t *testing.T) {
	measuresHeap(t)
	t.Parallel()
	side, mib := soak(t, 2048, schemas.MaxSide), soak(t, 128, 1100)
	const samples = 16 // twice as many as fit at once
	c := assemble(t)
	b := c.Bus
	spec := schemas.Group{
		Batch: "g", Reward: []schemas.RewardSpec{{Name: "jpeg_compressibility", Weight: new(1.0), Required: new(true)}},
		Advantage: schemas.AdvantageSpec{Estimator: "flow_grpo", Std: "group", StdBasis: "sample", Epsilon: new(1e-4)},
	}
	put := func(uid schemas.UID, i, n int64, width, height int, file []byte) {
		t.Helper()
		ref, err := b.PutBlob(t.Context(), file)
		if err != nil {
			t.Fatal(err)
		}
		e := &schemas.Trajectory{
			Identity:   schemas.Identity{Stage: schemas.StageMain, Run: "r", UID: uid, SampleIndex: i, GroupSize: n, Lane: "l"},
			Provenance: schemas.Provenance{Attempt: "a"},
			Outcome:    schemas.Outcome{StopReason: schemas.StopCompleted},
			Sampling: schemas.Sampling{
				Prompt: "a red fox", Height: int64(height), Width: int64(width), LogProbKind: schemas.LogProbDensity, Solver: "euler",
				LatentsDType: "F32",
			},
			Denoised:      schemas.Denoised{CFGRule: schemas.CFGPlain, LatentsShape: []int64{2, 64}, Conditioning: []schemas.NamedTensor{}},
			ContentDigest: digest, ScheduleDigest: digest,
			Media: []schemas.Medium{{Kind: schemas.KindImage, Format: schemas.ImagePNG, Width: int64(width), Height: int64(height), Digest: digest, Ref: &ref}}, Group: spec,
		}
		e.Group.Batch = string(uid)
		oneStep(t, b, e)
		if _, err := b.Publish(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
	large := flatImage(t, side, side)
	for i := range int64(samples) {
		put("g", i, samples, side, side, large)
	}
	// A file that says what it is not, and one that is larger than all there is room for.
	put("bomb", 0, 1, 16, 16, large)
	put("huge", 0, 1, schemas.MaxSide, schemas.MaxSide*2/3/16*16, []byte("not even looked at"))
	v := harness.Raise(t, &harness.Process{
		Name: "reward", Path: program(t, "meander-reward"), Dir: t.TempDir(), Env: traceCollections(),
		Args: []string{
			"--nats-url", c.Server.ClientURL(), "--health-addr", "", "--workers", strconv.Itoa(samples), "--image-mib", strconv.Itoa(mib),
		},
	})
	wanted := samples + 2
	bustest.Until(t, "all rewards", func() error {
		if n := c.messages(t, schemas.StreamRewards); n != uint64(wanted) {
			return fmt.Errorf("%d of %d", n, wanted)
		}
		return nil
	})
	live := maxLiveMiB(t, v)
	t.Logf("%d MiB in use with %d images of %dx%d, image_mib %d", live, samples, side, side, mib)
	if ceiling := mib + beside; live > ceiling {
		t.Errorf("%d MiB in use; must stay below %d", live, ceiling)
	}
	for m, err := range b.Read(t.Context(), schemas.StreamRewards, nil, bus.ReadOptions{}) {
		var r schemas.Reward
		if err != nil {
			t.Fatal(err)
		}
		if err := bus.Fits(m, &r); err != nil {
			t.Fatal(err)
		}
		want := map[schemas.UID]string{"g": schemas.StatusScored}[r.UID]
		if want == "" {
			want = schemas.StatusFailed
		}
		if r.Status != want {
			t.Errorf("%s sample %d: %s %q, want %s", r.UID, r.SampleIndex, r.Status, r.Error, want)
		}
	}
}

// The other programs have ceilings of their own, as ARCHITECTURE.md says: prompts as long
// and groups as large as they may be, and images of 1024 x 1024 with every state kept. A soak
// has more of both.
func TestMemory_OthersStayBelowTheirCeilings(t *testing.T) {
	measuresHeap(t)
	t.Parallel()
	c := assemble(t)
	server := []string{"--nats-url", c.Server.ClientURL(), "--health-addr", ""}
	programs := []struct {
		name    string
		args    []string
		ceiling int // MiB
	}{
		{"meander-intake", nil, 64},
		{"meander-sampler", []string{"--model", "synthetic", "--batch", "8", "--workers", "1", "--publish-window-mib", "64"}, 256 + 64},
		{"meander-reward", nil, 512 + beside},
		{"meander-advantage", []string{"--max-held", "2000"}, 64 + 16*2000*7/10>>10},
	}
	var running []*harness.Process
	for _, p := range programs {
		running = append(running, harness.Raise(t, &harness.Process{
			Name: p.name, Path: program(t, p.name), Dir: t.TempDir(), Env: traceCollections(), Args: append(p.args, server...),
		}))
	}
	long := strings.Repeat("a long prompt ", schemas.MaxPromptBytes/14)
	prompts := 0
	put := func(p *schemas.Prompt) {
		t.Helper()
		p.UID, p.Reward = schemas.UID(fmt.Sprint("u", prompts)), []schemas.RewardSpec{{Name: "jpeg_compressibility"}}
		prompts++
		if _, err := c.client.Publish(limited(t), "r", p); err != nil {
			t.Fatal(err)
		}
	}
	for range soak(t, 1, 4) { // requests of 16 MiB a prompt
		put(&schemas.Prompt{
			Prompt: long, GroupSize: new(int64(schemas.MaxGroupSize)),
			ImageSettings: schemas.ImageSettings{
				NumInferenceSteps: new(int64(1)), Height: new(int64(16)), Width: new(int64(16)),
			},
		})
	}
	for range soak(t, 1, 4) { // a sample keeps 5 MiB
		put(&schemas.Prompt{
			Prompt: "a red fox", GroupSize: new(int64(16)),
			ImageSettings: schemas.ImageSettings{
				NumInferenceSteps: new(int64(4)), Height: new(int64(1024)), Width: new(int64(1024)),
			},
		})
	}
	bustest.Until(t, "all groups", func() error {
		if n := c.messages(t, schemas.StreamAdvantages); n != uint64(prompts) {
			return fmt.Errorf("%d of %d, %d rewards", n, prompts, c.messages(t, schemas.StreamRewards))
		}
		return nil
	})
	for i, p := range programs {
		live := maxLiveMiB(t, running[i])
		t.Logf("%s: %d MiB in use, ceiling %d", p.name, live, p.ceiling)
		if live > p.ceiling {
			t.Errorf("%s: %d MiB in use; must stay below %d", p.name, live, p.ceiling)
		}
	}
}

// flatImage is a PNG file of one grey: few bytes for many pixels.
func flatImage(t *testing.T, width, height int) []byte {
	t.Helper()
	img := image.NewNRGBA(image.Rect(0, 0, width, height))
	for i := range img.Pix {
		img.Pix[i] = byte(100 + i&3/3*155)
	}
	var file bytes.Buffer
	if err := (&png.Encoder{CompressionLevel: png.BestSpeed}).Encode(&file, img); err != nil {
		t.Fatal(err)
	}
	return file.Bytes()
}

// traceCollections is an environment in which a program reports each garbage collection on its standard error. GOGC
// leaves out the room of heap.Bound, so that collections are frequent enough.
func traceCollections() []string {
	return []string{"GODEBUG=gctrace=1", "GOGC=100"}
}

// liveHeap matches the report of one garbage collection: heap at its start, at its end, and what is still in use, in
// MiB.
var liveHeap = regexp.MustCompile(`(?m)^gc \d+ @.* \d+->\d+->(\d+) MB`)

// maxLiveMiB is the most memory that a program with traceCollections had in use at a collection. Unlike the peak that
// the kernel counts, it does not grow when a busy machine delays the collector.
func maxLiveMiB(t *testing.T, v *harness.Process) int {
	t.Helper()
	most, reports := 0, liveHeap.FindAllStringSubmatch(v.Log(t), -1)
	if len(reports) == 0 {
		t.Fatalf("%s: no collection in its log", v.Name)
	}
	for _, report := range reports {
		live, err := strconv.Atoi(report[1])
		if err != nil {
			t.Fatal(err)
		}
		most = max(most, live)
	}
	return most
}
