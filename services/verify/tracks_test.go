package verify_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/models/model/remote/remotetest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/pipeline"
	"github.com/meander-rl/meander/services/verify"
)

// A pipeline with two tracks makes steps that have both, whose log-probs verify finds again; at a size whose tracks are
// not known it refuses samples by name.
func TestRun_Tracks(t *testing.T) {
	t.Parallel()
	dir := remotetest.Folder(t, remotetest.TracksClass, 1)
	_, sampling := remotetest.Start(t, remotetest.Options{Dir: dir, Deterministic: true})
	_, verifying := remotetest.Start(t, remotetest.Options{Dir: dir, Deterministic: true})
	x := newStudio(t, "proj.weight", []int{remotetest.Channels, remotetest.Channels}, func(c *pipeline.Config) {
		c.Sampler.Model, c.Sampler.Engine = dir, "torch="+sampling
	})
	tr := x.sample("p")
	want := []schemas.Track{
		{Name: "video", Shape: []int64{3, 4, remotetest.Channels}, Elements: 12 * remotetest.Channels},
		{Name: "sound", Shape: []int64{4 * remotetest.Channels}, Elements: 4 * remotetest.Channels},
	}
	if !slices.EqualFunc(tr.Tracks, want, func(a, b schemas.Track) bool { return a.Same(&b) }) {
		t.Fatalf("%q: tracks %v, want %v", tr.Error, tr.Tracks, want)
	}
	for i := range tr.Steps {
		step, err := x.Bus.LoadStepOf(t.Context(), tr, i)
		if err != nil {
			t.Fatal(err)
		}
		if err := step.Validate(); err != nil || len(step.Tracks) != 2 || step.Tracks[1].Name != "sound" ||
			(step.Tracks[1].LogProb == nil) != (step.LogProb == nil) {
			t.Errorf("step %d: tracks %+v, %v", i, step.Tracks, err)
		}
	}
	x.proves(1, verify.Options{Model: []string{dir}, Engine: "torch=" + verifying})
	if _, err := x.peer.Publish(t.Context(), "r", &schemas.Prompt{
		UID: "q", Prompt: "red", GroupSize: new(int64(1)),
		ImageSettings: schemas.ImageSettings{Height: new(int64(128)), Width: new(int64(64))},
	}); err != nil {
		t.Fatal(err)
	}
	bustest.Await(t, x.Bus, 1, schemas.StreamAdvantages, schemas.AdvantageSubject("r", "q"))
	failed, err := x.peer.Trajectory(t.Context(), "r", "q", 0)
	if err != nil || !strings.Contains(failed.Error, "must be the default size of LTX2Pipeline") {
		t.Errorf("%+v, %v", failed, err)
	}
}
