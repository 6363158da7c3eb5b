package integration_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/models/media"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
	"github.com/meander-rl/meander/pkg/scorer"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/verify"
)

// Videos of a worker go the whole way: steps of all frames, the file with every frame and the one in the middle,
// rewards, verify; an image of the same network is an image, and frames that it does not make are refused.
func TestTorch_Video(t *testing.T) {
	t.Parallel()
	dir := remotetest.Folder(t, "WanPipeline", 1)
	_, address := remotetest.Start(t, remotetest.Options{Dir: dir, Deterministic: true})
	engine := "torch=" + address
	w := start(t, func(c *config) { c.sampler.Model, c.sampler.Engine = dir, engine })
	digests := map[string]bool{}
	for _, frames := range []int64{0, 1, 5} {
		uid := schemas.UID(fmt.Sprintf("f%d", frames))
		prompt := &schemas.Prompt{
			UID: uid, Prompt: "a dog that runs", GroupSize: new(int64(2)), Seed: new(int64(5)),
			Reward: []schemas.RewardSpec{{Name: "synthetic"}, {Name: "diversity"}, {Name: "motion"}},
			ImageSettings: schemas.ImageSettings{
				Height: new(int64(32)), Width: new(int64(48)), Rollout: schemas.Rollout{SDEStepIndices: []int64{1, 2}},
			},
		}
		want := int64(9) // the model's
		if frames > 0 {
			prompt.Frames, want = &frames, frames
		}
		if frames == 1 { // whose motion nobody can rate
			_, err := w.client.Publish(t.Context(), "bad", prompt)
			if err == nil || !strings.Contains(err.Error(), `name: "motion"; rates videos, and the samples are images`) {
				t.Errorf("the motion of an image: %v", err)
			}
			prompt.Reward = prompt.Reward[:2]
		}
		if r, err := w.client.Publish(t.Context(), "r", prompt); err != nil || !r.Accepted {
			t.Fatalf("%d frames: receipt %+v, %v", frames, r, err)
		}
		bustest.Await(t, w.Bus, 1, schemas.StreamAdvantages, schemas.AdvantageSubject("r", uid))
		tr, err := w.client.Trajectory(t.Context(), "r", uid, 1)
		if err != nil || tr.StopReason != schemas.StopCompleted {
			t.Fatalf("%d frames: %+v, %v", frames, tr, err)
		}
		if shape := tr.LatentsShape; shape[0] != (1+(want-1)/4)*2*3 || len(tr.StochasticSteps()) != 2 {
			t.Errorf("%d frames: states %v", want, shape)
		}
		a := w.advantages(t, "r", len(digests)+1)[uid]
		if a == nil || a.Status != schemas.StatusComplete {
			t.Fatalf("%d frames: advantage %+v", frames, a)
		}
		digests[tr.ScheduleDigest] = true
		sameVideo(t, w, tr, want)
		diverseVideos(t, w, tr)
	}
	if len(digests) != 3 {
		t.Errorf("%d schedule digests; want one for each number of frames", len(digests))
	}
	r, err := verify.Run(t.Context(), w.Bus, "r", verify.Options{Model: []string{dir}, Engine: engine})
	if err != nil || !r.OK(0) || r.MaxRatio != 0 || r.Steps != 12 {
		t.Errorf("verify: %+v, %v", r, err)
	}
	for frames, fault := range map[int64]string{
		6: "frames: 6; must be 1 more than a multiple of 4, such as 5 or 9", 37: "frames: 37; must be at most 33",
	} {
		p := &schemas.Prompt{UID: "bad", Prompt: "x", ImageSettings: schemas.ImageSettings{Frames: &frames}}
		if _, err := w.client.Publish(t.Context(), "bad", p); err == nil || !strings.Contains(err.Error(), fault) {
			t.Errorf("%d frames: %v; want %q", frames, err, fault)
		}
	}
}

// sameVideo checks that a trajectory has a video of so many frames, whose middle one is its image; of 1 frame it has
// an image alone.
func sameVideo(t *testing.T, w *world, tr *schemas.Trajectory, frames int64) {
	t.Helper()
	image, err := w.client.Medium(t.Context(), tr, schemas.KindImage)
	if err != nil {
		t.Fatal(err)
	}
	middle, err := media.Decode(image, media.ImageSize(tr.Height, tr.Width))
	if err != nil || middle.Digest() != tr.Medium(schemas.KindImage).Digest {
		t.Fatalf("image: %v", err)
	}
	if frames == 1 {
		if tr.Frames != 0 || tr.Medium(schemas.KindVideo) != nil {
			t.Errorf("an image has %d frames, video %+v", tr.Frames, tr.Media)
		}
		return
	}
	file, err := w.client.Medium(t.Context(), tr, schemas.KindVideo)
	if err != nil {
		t.Fatal(err)
	}
	video, err := media.Decode(file, media.Size{Frames: int(frames), Height: int(tr.Height), Width: int(tr.Width)})
	if err != nil || tr.Frames != frames || tr.Medium(schemas.KindVideo).FPS != 8 {
		t.Fatalf("video of %d frames: %+v, %v", frames, tr.Media, err)
	}
	if video.Digest() != tr.Medium(schemas.KindVideo).Digest ||
		video.Middle().Digest() != tr.Medium(schemas.KindImage).Digest ||
		video.Digest() == middle.Digest() {
		t.Errorf("%d frames: other pixels than the trajectory says", frames)
	}
}

// diverseVideos checks that the score of diversity is that of the frames that it is said to see.
func diverseVideos(t *testing.T, w *world, tr *schemas.Trajectory) {
	t.Helper()
	rater := scorer.NewGroup(scorer.Diversity)
	of := func(frames int) float64 {
		g := scorer.Group{Members: []int64{0, 1}}
		g.Sample = func(_ context.Context, i int) (in scorer.Input, release func(), err error) {
			one, err := w.client.Trajectory(t.Context(), tr.Run, tr.UID, int64(i))
			if err != nil {
				return in, nil, err
			}
			file, err := w.client.Medium(t.Context(), one, schemas.KindImage)
			size := media.ImageSize(tr.Height, tr.Width)
			if one.Medium(schemas.KindVideo) != nil {
				size.Frames = int(one.Medium(schemas.KindVideo).Frames)
				file, err = w.client.Medium(t.Context(), one, schemas.KindVideo)
			}
			if err == nil {
				in.Media, err = media.Decode(file, size)
			}
			in.Media = in.Media.Spaced(frames)
			return in, func() {}, err
		}
		return rater.ScoreGroup(t.Context(), g)[1].Value
	}
	seen, middle := of(scorer.DiversityFrames), of(1)
	var r schemas.Reward
	filter := schemas.RewardFilter(tr.Run, "*", tr.UID)
	stored, err := w.Bus.LastMany(t.Context(), schemas.StreamRewards, []string{filter})
	for _, m := range stored {
		if err == nil && r.SampleIndex != 1 {
			r = schemas.Reward{}
			err = bus.Fits(m, &r)
		}
	}
	if err != nil || len(r.Scores) < 2 {
		t.Fatalf("reward of %v: %+v, %v", tr.UID, r, err)
	}
	score := r.Scores[1]
	if score.Name != scorer.Diversity || score.Value == nil || *score.Value != seen {
		t.Errorf("%v: %+v; want a diversity of %v", tr.UID, score, seen)
	}
	if video := tr.Medium(schemas.KindVideo) != nil; video != (seen != middle) {
		t.Errorf("%v: diversity %v, of the frames in the middle %v", tr.UID, seen, middle)
	}
}

// A video starts others: it is encoded with all frames, noised and denoised, and rolled by scheduled sampling.
func TestTorch_VideoStart(t *testing.T) {
	t.Parallel()
	folder, dir := remotetest.Folder(t, "WanPipeline", 1), t.TempDir()
	run := func(args ...string) summary {
		_, sum := byWorker(t, dir, nil, append([]string{
			args[0], "--json", "--model", folder, "--engine", "torch", "--deterministic", "--seed", "5",
		}, args[1:]...)...).must(t, 0).parse(t)
		return sum
	}
	size := []string{"--frames", "5", "--height", "32", "--width", "48"}
	run(append([]string{"run", "--run", "r", "-n", "1", "--steps", "4", "--out", "out", "a dog"}, size...)...)
	files, err := filepath.Glob(filepath.Join(dir, "out", "*.apng"))
	if err != nil || len(files) != 1 {
		t.Fatalf("videos %q, %v", files, err)
	}
	sum := run("run", "--run", "s", "-n", "2", "--steps", "4", "--start-image", files[0], "--start-step", "2", "a dog")
	if sum.Complete != 1 || sum.StepsStored != 4 {
		t.Errorf("from a video: %+v", sum)
	}
	if r := provenRun(t, byWorker(t, dir, nil, "verify", "--json", "--run", "s", "--model", folder)); r.MaxRatio != 0 {
		t.Errorf("from a video: ratio %g", r.MaxRatio)
	}
	byWorker(t, dir, nil, "scheduled", "--model", folder, "--engine", "torch", "--deterministic", "--run", "q",
		"--seed",
		"5", "--probability", "1", "--prompt", "a dog", "--out", "q", files[0]).must(t, 0)
	sheets, err := filepath.Glob(filepath.Join(dir, "q", "*sheet*.png"))
	if err != nil || len(sheets) != 1 {
		t.Errorf("sheets %q, %v", sheets, err)
	}
	if r := provenRun(t, byWorker(t, dir, nil, "verify", "--json", "--run", "q", "--model", folder)); r.Rolled == 0 {
		t.Errorf("scheduled sampling of a video: %+v", r)
	}
}

// A worker that dies costs a video nothing: the digest of the run is that of an undisturbed one.
func TestTorch_VideoWorkerDies(t *testing.T) {
	t.Parallel()
	folder := remotetest.Folder(t, "WanPipeline", 3)
	var digests []string
	for _, variables := range [][]string{nil, {
		remotetest.FaultVariable + "=" + remotetest.FaultOnce,
		remotetest.FileVariable + "=" + filepath.Join(t.TempDir(), "died"),
	}} {
		dir := t.TempDir()
		out := byWorker(t, dir, variables, append([]string{
			"run", "--model", folder, "--engine", "torch", "--deterministic", "--frames", "5", "--log-level", "warn", "--out",
			"out",
		}, torchRun...)...).must(t, 0)
		_, sum := out.parse(t)
		digests = append(digests, sum.Digest)
		for glob, frames := range map[string]int{"*-0*.apng": 5, "*-0*.png": 1, "*-sheet.png": 1} {
			files, err := filepath.Glob(filepath.Join(dir, "out", glob))
			if want := map[bool]int{true: 2, false: 16}[glob == "*-sheet.png"]; err != nil || len(files) != want {
				t.Errorf("%s: %d files, %v; want %d", glob, len(files), err, want)
			}
			for _, name := range files {
				file, err := os.ReadFile(name)
				if size, bad := media.ReadSize(file); err != nil || bad != nil || size.Frames != frames {
					t.Errorf("%s: %v, %v, %v; want %d frames", name, size, err, bad, frames)
				}
			}
		}
		if lost := strings.Contains(out.stderr, "the worker is lost"); sum.Complete != 2 || lost != (variables != nil) {
			t.Errorf("%v: %+v\n%s", variables, sum, out.stderr)
		}
		if r := provenRun(t, byWorker(t, dir, nil, "verify", "--json", "--model", folder)); r.Steps != 32 ||
			r.MaxRatio != 0 {
			t.Errorf("%d steps, ratio %g; want all exact", r.Steps, r.MaxRatio)
		}
	}
	if digests[0] == "" || digests[0] != digests[1] {
		t.Errorf("digests %q; want them equal", digests)
	}
}

// The second network of a model has a scale of guidance of its own, from its boundary on, and a model of one network
// refuses that before anything is drawn.
func TestTorch_SecondScale(t *testing.T) {
	t.Parallel()
	dir := remotetest.Folder(t, "WanPipeline", 1)
	serve := func(boundary float64) (w *world, engine string) {
		_, address := remotetest.Start(t, remotetest.Options{Dir: dir, Deterministic: true, BoundaryRatio: boundary})
		engine = "torch=" + address
		return start(t, func(c *config) { c.sampler.Model, c.sampler.Engine = dir, engine }), engine
	}
	prompt := func(second *float64) *schemas.Prompt {
		return &schemas.Prompt{
			UID: "u", Prompt: "a dog that runs", GroupSize: new(int64(2)), Seed: new(int64(5)),
			Reward: []schemas.RewardSpec{{Name: "synthetic"}},
			ImageSettings: schemas.ImageSettings{
				Height: new(int64(32)), Width: new(int64(48)), TrueCFGScale: new(4.0), TrueCFGScale2: second,
			},
		}
	}
	w, engine := serve(0.8)
	var samples []*schemas.Trajectory
	for run, second := range map[schemas.Run]*float64{"one": nil, "two": new(2.0)} {
		if r, err := w.client.Publish(t.Context(), run, prompt(second)); err != nil || !r.Accepted {
			t.Fatalf("receipt %+v, %v", r, err)
		}
		bustest.Await(t, w.Bus, 1, schemas.StreamAdvantages, schemas.AdvantageSubject(run, "u"))
		tr, err := w.client.Trajectory(t.Context(), run, "u", 1)
		if err != nil || tr.StopReason != schemas.StopCompleted {
			t.Fatalf("%+v, %v", tr, err)
		}
		samples = append(samples, tr)
		r, err := verify.Run(t.Context(), w.Bus, run, verify.Options{Model: []string{dir}, Engine: engine})
		if err != nil || !r.OK(0) || r.MaxRatio != 0 || r.Steps != 8 {
			t.Errorf("verify: %+v, %v", r, err)
		}
	}
	for i, sigma := range samples[0].Sigmas[:4] {
		if alike := *samples[0].LogProbs[i] == *samples[1].LogProbs[i]; alike != (sigma >= 0.8) {
			t.Errorf("step %d at sigma %g: log-probs %g and %g", i, sigma, *samples[0].LogProbs[i],
				*samples[1].LogProbs[i])
		}
	}
	one, _ := serve(0)
	const fault = "true_cfg_scale_2: 2; must be absent"
	_, err := one.client.Publish(t.Context(), "r", prompt(new(2.0)))
	if err == nil || !strings.Contains(err.Error(), fault) {
		t.Errorf("%v; want %q", err, fault)
	}
}
