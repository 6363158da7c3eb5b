package reward

import (
	"strings"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// noisy is a sample that stops with noise in it, and so has no image.
func noisy(t *testing.T, uid schemas.UID, i, n int64, rewards ...string) *schemas.Trajectory {
	t.Helper()
	tr := trajectory(t, "r", uid, i, n, 7, rewards...)
	tr.Sigmas, tr.Timesteps, tr.Transitions = []float32{1, 0.5, 0}, []float32{1000, 500, 0}, []string{"sde", "sde"}
	tr.LogProbs, tr.Stop, tr.Media = append(tr.LogProbs, nil), &schemas.SegmentStop{StepIndex: 1}, nil
	if err := tr.Validate(); err != nil {
		t.Fatal(err)
	}
	return tr
}

// A sample without an image is scored by those who need none; every other function fails by
// name, those of a group too, and holds nothing up. What counts as trained is what ran.
func TestService_NoImage(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	p.serve(t, testConfig())
	p.put(t, verdict("judged", 0, "human", new(0.5)))
	p.put(t, noisy(t, "judged", 0, 1, "external:human", "jpeg_compressibility?"),
		noisy(t, "required", 0, 1, "jpeg_compressibility"))
	p.put(t, noisy(t, "apart", 0, 2, "diversity", "synthetic?"), noisy(t, "apart", 1, 2, "diversity", "synthetic?"))
	got := p.rewards(t, "r", 4)
	const why = "there is no image: the sample stops at step 1 of 2 with noise in it; stop.decode makes one"
	if r := got["judged.0"]; r.Status != "scored" || *r.Reward != 0.5 || r.Scores[1].Status != "failed" ||
		r.Scores[1].Error != why {
		t.Errorf("a verdict, and an optional function that looks at images: %+v", r)
	}
	for _, name := range []string{"required.0", "apart.0", "apart.1"} {
		if r := got[name]; r.Status != "failed" || r.Scores[0].Status != "failed" || r.Scores[0].Error != why ||
			!strings.Contains(r.Error, r.Scores[0].Name) {
			t.Errorf("%s: %+v, want the function named, and why", name, r)
		}
	}
	for name, r := range got {
		if r.TrainedSteps != 1 {
			t.Errorf("%s: %d trained steps, want the one that ran", name, r.TrainedSteps)
		}
	}
}
