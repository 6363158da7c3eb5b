package texts

import (
	"path/filepath"
	"slices"
	"testing"

	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/lm/families"
	"github.com/meander-rl/meander/pkg/models/lm/qwen2/qwen2test"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler/engine"
)

// Answers after a rest have the same bits, whether the cache was kept or was taken for others.
func TestTurns_CacheIsKeptOrMadeAgain(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "babble")
	if err := (qwen2test.Random{Seed: 3}).Write(dir); err != nil {
		t.Fatal(err)
	}
	open := func(bytes int) *tokenEngine {
		m, err := families.All().Open(dir, lm.Options{Options: model.Options{Threads: 1}, CacheBytes: bytes})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = m.Close() })
		return newTokenEngine(m, true)
	}
	roomy := open(0)
	want := talk(t, roomy, 6, nil)
	taken := 0
	if got := talk(t, roomy, 6, func() {
		if roomy.resting.dropCaches() {
			taken++
		}
	}); taken == 0 || !slices.EqualFunc(got, want, slices.Equal) {
		t.Errorf("%d times taken: %v, want %v", taken, got, want)
	}
}

// talk has samples answer three times each; between is called while all of them rest.
func talk(t *testing.T, e *tokenEngine, samples int, between func()) (ids [][]int32) {
	t.Helper()
	var episodes []engine.Episode
	for i := range samples {
		x := &schemas.TextRequest{
			Messages: []schemas.Message{{Role: "user", Content: "2+2=?"}}, MaxNewTokens: 6, Temperature: 1, TopP: 1, TokensPerEvent: 1, Vocabulary: int64(e.card.Vocabulary),
			Interaction: &schemas.Interaction{Name: "tutor", MaxTurns: new(int64(3)), TimeoutMS: new(int64(1))},
		}
		req := &schemas.Request{Identity: schemas.Identity{
			Stage: schemas.StageMain, Run: "r", UID: "g", SampleIndex: int64(i),
		}, Sampling: schemas.Sampling{SampleSeed: uint64(i)}, Text: x}
		req.ScheduleDigest = req.ComputeScheduleDigest()
		p, err := e.Start(t.Context(), req, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = p.(*tokenEpisode).Close() }()
		episodes = append(episodes, p)
	}
	for range 3 {
		for {
			active := slices.DeleteFunc(slices.Clone(episodes),
				func(p engine.Episode) bool { return engine.Asks(p) != nil })
			if len(active) == 0 {
				break
			}
			if err := e.Step(t.Context(), active); err != nil {
				t.Fatal(err)
			}
			for _, p := range active {
				if _, err := p.Take(); err != nil {
					t.Fatal(err)
				}
			}
		}
		for _, p := range episodes {
			p.(engine.Talker).Rest()
		}
		if between != nil {
			between()
		}
		for _, p := range episodes {
			if err := p.(engine.Talker).Told(t.Context(), &schemas.InteractReply{Content: "again"}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, p := range episodes {
		if !p.Done() {
			t.Error("not done after three answers")
		}
		ids = append(ids, p.(*tokenEpisode).ids)
	}
	return ids
}
