package reward

import (
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// ofGroup is a sample whose reward is a function of one's own for groups of at least least, and others.
func ofGroup(t testing.TB, uid schemas.UID, i, n, least int64, rewards ...string) *schemas.Trajectory {
	t.Helper()
	tr := trajectory(t, "r", uid, i, n, uint8(40*i), rewards...)
	tr.Group.Reward[0].GroupMin = least
	return tr
}

// ended is a sample that ended without an image.
func ended(t testing.TB, of *schemas.Trajectory, reason, why string) *schemas.Trajectory {
	t.Helper()
	return &schemas.Trajectory{
		Identity: of.Identity, Provenance: schemas.Provenance{Attempt: "a", Timings: of.Timings}, Group: of.Group,
		Outcome: schemas.Outcome{StopReason: reason, Error: why},
	}
}

// judge answers for nats:NAME with what reply makes of a request for a group.
func (p *plane) judge(t testing.TB, name string, reply func(r *schemas.ScoreRequest) any) {
	t.Helper()
	s, err := p.Conn().QueueSubscribe(schemas.ScoreSubject(name), name, func(m *nats.Msg) {
		r := &schemas.ScoreRequest{}
		if err := schemas.DecodeValid(m.Data, r); err != nil {
			t.Errorf("request: %v", err)
		}
		v := reply(r)
		if v == nil {
			return
		}
		data, err := msgpack.Marshal(v)
		if err == nil {
			err = m.Respond(data)
		}
		if err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Unsubscribe() })
}

// says makes a reply with a score for each member.
func says(r *schemas.ScoreRequest, score func(m *schemas.ScoreMember) float64) map[string]any {
	scores := []map[string]any{}
	for i := range r.Members {
		m := &r.Members[i]
		scores = append(scores, map[string]any{"sample_index": m.SampleIndex, "score": score(m)})
	}
	slices.Reverse(scores) // their order says nothing
	return map[string]any{"v": 1, "scores": scores}
}

// A function of one's own is asked once for the whole group when all its samples have ended, is told which it does not
// see, and its scores are those of the samples that it names. The rewards say how many were compared.
func TestService_GroupFunction(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	var asked atomic.Int64
	p.judge(t, "rank", func(r *schemas.ScoreRequest) any {
		asked.Add(1)
		var indexes []int64
		for _, m := range r.Members {
			indexes = append(indexes, m.SampleIndex)
			if len(m.Image) == 0 || m.ImageFormat != "png" {
				t.Errorf("member %d has %d bytes of %q", m.SampleIndex, len(m.Image), m.ImageFormat)
			}
		}
		missing := []schemas.ScoreMissing{
			{SampleIndex: 1, Why: "trajectory failed: NaN"}, {SampleIndex: 3, Why: "trajectory pruned: too unlikely"},
		}
		if r.GroupSize != 5 || r.Prompt != `a sign that says "A"` || !slices.Equal(indexes, []int64{0, 2, 4}) ||
			!slices.Equal(r.Missing, missing) || len(r.Image) > 0 {
			t.Errorf("asked for %v of %d, %q, missing %v", indexes, r.GroupSize, r.Prompt, r.Missing)
		}
		return says(r, func(m *schemas.ScoreMember) float64 { return float64(10 * m.SampleIndex) })
	})
	p.serve(t, testConfig())
	p.serve(t, testConfig())
	for i := range int64(5) {
		tr := ofGroup(t, "g", i, 5, 2, "nats:rank", "jpeg_incompressibility")
		switch i {
		case 1:
			tr = ended(t, tr, schemas.StopFailed, "NaN")
		case 3:
			tr = ended(t, tr, schemas.StopPruned, "too unlikely")
		}
		p.put(t, tr)
	}
	got := p.rewards(t, "r", 5)
	for i := range 5 {
		r := got[fmt.Sprint("g.", i)]
		if i%2 == 1 {
			if r.Status == schemas.StatusScored {
				t.Errorf("sample %d: %+v", i, r)
			}
			continue
		}
		if r.Status != schemas.StatusScored || *r.Scores[0].Value != float64(10*i) || r.Scores[0].Members != 3 ||
			r.Scores[0].Version != "nats-1" || r.Scores[1].Members != 0 {
			t.Errorf("sample %d: %s %q %+v", i, r.Status, r.Error, r.Scores)
		}
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("asked %d times", n)
	}
	m, err := p.Last(t.Context(), schemas.StreamVerdicts, schemas.RatingSubject("r", "g", 0))
	if err != nil {
		t.Fatal(err)
	}
	if rating := bustest.Decode[schemas.Rating](t, m); rating.Name != "nats:rank" || len(rating.Members) != 3 ||
		*rating.Members[2].Value != 40 {
		t.Errorf("rating %+v", rating)
	}
}

// What is wrong with a reply is said of the samples that it is about, and never becomes a number.
func TestService_GroupReplies(t *testing.T) {
	t.Parallel()
	score := func(index int64, v any) map[string]any { return map[string]any{"sample_index": index, "score": v} }
	scores := func(list ...any) map[string]any { return map[string]any{"v": 1, "scores": list} }
	prefers := func(a, b int64, p any) map[string]any { return map[string]any{"a": a, "b": b, "p": p} }
	preferences := func(list ...any) map[string]any { return map[string]any{"v": 1, "preferences": list} }
	tooMany := make([]any, schemas.MaxPreferences+1)
	for i := range tooMany {
		tooMany[i] = prefers(0, 1, 1)
	}
	tests := map[string]struct {
		reply map[string]any
		want  [3]any // a score, or what the error says
	}{
		"other order":     {scores(score(2, 2.5), score(0, 0.5), score(1, 1.5)), [3]any{0.5, 1.5, 2.5}},
		"too few":         {scores(score(0, 1), score(2, 3)), [3]any{1.0, "no score of sample 1", 3.0}},
		"none":            {scores(), [3]any{"neither scores", "neither scores", "neither scores"}},
		"too many":        {scores(score(0, 1), score(1, 1), score(2, 1), score(3, 1)), [3]any{"scores[3].sample_index: 3; must be", "", ""}},
		"twice":           {scores(score(0, 1), score(1, 1), score(0, 2)), [3]any{"comes twice", "comes twice", "comes twice"}},
		"no number":       {scores(score(0, math.NaN()), score(1, nil), score(2, 1e31)), [3]any{"NaN", "null", "1e+31; must be between"}},
		"own error":       {scores(score(0, 1), map[string]any{"sample_index": 1, "error": "all black"}, score(2, 1)), [3]any{1.0, "all black", 1.0}},
		"by position":     {scores(1, 2, 3), [3]any{"must be a map of sample_index", "", ""}},
		"of one sample":   {map[string]any{"v": 1, "score": 1}, [3]any{"does the function rate whole groups?", "", ""}},
		"error":           {map[string]any{"v": 1, "error": "broken"}, [3]any{"broken", "broken", "broken"}},
		"preferences":     {preferences(prefers(0, 1, 1), prefers(1, 2, 0.25), prefers(2, 0, 0.5), prefers(1, 0, 0.5)), [3]any{2. / 3, 0.25, 0.625}},
		"compares two":    {preferences(prefers(0, 1, 0.75)), [3]any{0.75, 0.25, "no preference names it"}},
		"no preference":   {preferences(prefers(0, 1, 1.5)), [3]any{"preferences[0].p: 1.5; must be 0 to 1", "", ""}},
		"with itself":     {preferences(prefers(0, 0, 1)), [3]any{"compares sample 0 with itself", "", ""}},
		"too many pairs":  {preferences(tooMany...), [3]any{"8193 preferences", "", ""}},
		"both at once":    {map[string]any{"v": 1, "scores": []any{score(0, 1)}, "preferences": []any{prefers(0, 1, 1)}}, [3]any{"one of the two", "", ""}},
		"another version": {map[string]any{"v": 2}, [3]any{"v: 2; must be 1", "", ""}},
	}
	p := newPlane(t)
	name := func(test string) string { return strings.ReplaceAll(test, " ", "-") }
	for test, tt := range tests {
		p.judge(t, name(test), func(*schemas.ScoreRequest) any { return tt.reply })
		for i := range int64(3) {
			p.put(t, ofGroup(t, schemas.UID(name(test)), i, 3, 2, "nats:"+name(test)+"?", "jpeg_incompressibility"))
		}
	}
	p.serve(t, testConfig())
	got := p.rewards(t, "r", 3*len(tests))
	for test, tt := range tests {
		for i, want := range tt.want {
			s := got[fmt.Sprintf("%s.%d", name(test), i)].Scores[0]
			if text, fails := want.(string); fails {
				if s.Value != nil || !strings.Contains(s.Error, text) {
					t.Errorf("%s, sample %d: %v %q, want %q", test, i, s.Value, s.Error, text)
				}
			} else if s.Value == nil || *s.Value != want {
				t.Errorf("%s, sample %d: %+v, want %v", test, i, s, want)
			}
		}
	}
	m, err := p.Last(t.Context(), schemas.StreamVerdicts, schemas.RatingSubject("r", "preferences", 0))
	if err != nil {
		t.Fatal(err)
	}
	want := []schemas.Preference{{A: 0, B: 1, P: 1}, {A: 1, B: 2, P: 0.25}, {A: 2, B: 0, P: 0.5}, {A: 1, B: 0, P: 0.5}}
	if rating := bustest.Decode[schemas.Rating](t, m); !slices.Equal(rating.Preferences, want) {
		t.Errorf("rating %+v", rating)
	}
}

// All samples of a group have scores of one answer, also where the service dies between the rewards of a group and the
// function gives other scores each time.
func TestService_GroupAnswersOnce(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	var asked atomic.Int64
	p.judge(t, "moody", func(r *schemas.ScoreRequest) any {
		nonce := float64(100 * asked.Add(1))
		return says(r, func(m *schemas.ScoreMember) float64 { return nonce + float64(m.SampleIndex) })
	})
	cfg := testConfig()
	cfg.ScorePatience, cfg.AckWait = time.Minute, time.Second
	first := p.serve(t, cfg)
	for i := range int64(4) {
		p.put(t, ofGroup(t, "g", i, 4, 2, "nats:moody", "nats:later")) // this one is away
	}
	bustest.Await(t, p.Bus, 1, schemas.StreamVerdicts, schemas.RatingSubject("r", "g", 0))
	first.Kill()
	p.serve(t, cfg)
	p.serve(t, cfg)
	p.judge(t, "later", func(*schemas.ScoreRequest) any { return map[string]any{"v": 1, "score": 0} })
	for key, r := range p.rewards(t, "r", 4) {
		if want := 100 + float64(r.SampleIndex); r.Reward == nil || *r.Reward != want {
			t.Errorf("%s: %+v, want %v", key, r, want)
		}
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("asked %d times", n)
	}
}

// A rating that is not of the stored samples is displaced: it decides nothing.
func TestService_ForgedRating(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	p.judge(t, "rank", func(r *schemas.ScoreRequest) any {
		return says(r, func(*schemas.ScoreMember) float64 { return 1 })
	})
	forged := &schemas.Rating{
		Run: "r", UID: "g", Name: "nats:rank", GroupSize: 2,
		Members: []schemas.RatedMember{{SampleIndex: 0, TrajectorySeq: 99, Value: new(7.0)}, {SampleIndex: 1, TrajectorySeq: 98, Value: new(7.0)}},
	}
	p.put(t, forged)
	p.serve(t, testConfig())
	for i := range int64(2) {
		p.put(t, ofGroup(t, "g", i, 2, 2, "nats:rank"))
	}
	for key, r := range p.rewards(t, "r", 2) {
		if r.Reward == nil || *r.Reward != 1 {
			t.Errorf("%s: %+v", key, r)
		}
	}
	if d := bustest.Dead(t, p.Bus, 1)[0]; d.Code != schemas.CodeDisplaced {
		t.Errorf("dead letter %+v", d)
	}
}

// A function that is away, or asks to be asked again, is; its group waits, and others do not.
func TestService_GroupFunctionAway(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	cfg := testConfig()
	cfg.ScorePatience = time.Minute
	p.serve(t, cfg)
	for i := range int64(2) {
		p.put(t, ofGroup(t, "waits", i, 2, 2, "nats:tired"))
		p.put(t, ofGroup(t, "alone", i, 2, 3, "nats:tired"))
	}
	p.handled(t)
	for key, r := range p.rewards(t, "r", 2) {
		if r.UID != "alone" || !strings.Contains(r.Error, "groups of at least 3 samples, and this one has 2 to show") {
			t.Errorf("%s: %+v", key, r)
		}
	}
	var asked atomic.Int64
	p.judge(t, "tired", func(r *schemas.ScoreRequest) any {
		if asked.Add(1) == 1 {
			return map[string]any{"v": 1, "error": "out of memory", "retry": true}
		}
		return says(r, func(*schemas.ScoreMember) float64 { return 0.5 })
	})
	for key, r := range p.rewards(t, "r", 4) {
		if r.UID == "waits" && (r.Reward == nil || *r.Reward != 0.5) {
			t.Errorf("%s: %+v", key, r)
		}
	}
}

// At its deadline a group is rated with the samples that are there, in time for the answer; one that comes later gets
// no score, and changes none.
func TestService_GroupDeadline(t *testing.T) {
	t.Parallel()
	p := newPlane(t)
	var asked atomic.Int64
	p.judge(t, "rank", func(r *schemas.ScoreRequest) any {
		asked.Add(1)
		if len(r.Members) != 2 || len(r.Missing) != 1 || !strings.Contains(r.Missing[0].Why, "had not ended") {
			t.Errorf("asked for %d, missing %v", len(r.Members), r.Missing)
		}
		return says(r, func(m *schemas.ScoreMember) float64 { return float64(m.SampleIndex) })
	})
	p.serve(t, testConfig())
	late := ofGroup(t, "g", 2, 3, 2, "nats:rank")
	now := time.Now()
	for i := range int64(2) {
		tr := ofGroup(t, "g", i, 3, 2, "nats:rank")
		tr.Group.Created, tr.Group.Deadline = now.UnixNano(), now.Add(16*time.Second).UnixNano()
		late.Group = tr.Group
		p.put(t, tr)
	}
	for key, r := range p.rewards(t, "r", 2) {
		if r.Reward == nil || *r.Reward != float64(r.SampleIndex) || r.Scores[0].Members != 2 ||
			r.Scored > r.Group.Deadline {
			t.Errorf("%s: %+v", key, r)
		}
	}
	p.put(t, late)
	r := p.rewards(t, "r", 3)["g.2"]
	if r.Status != schemas.StatusFailed || !strings.Contains(r.Error, "came too late") {
		t.Errorf("late: %+v", r)
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("asked %d times", n)
	}
}

// A server is asked for a group with the same map as a worker, and what it says counts in the same way.
func TestService_GroupOverHTTP(t *testing.T) {
	t.Parallel()
	for _, format := range []string{"json", "msgpack"} {
		t.Run(format, func(t *testing.T) {
			t.Parallel()
			var tries atomic.Int64
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if tries.Add(1) == 1 {
					http.Error(w, "starting", http.StatusServiceUnavailable)
					return
				}
				data, err := io.ReadAll(r.Body)
				if err != nil {
					t.Error(err)
				}
				e := &schemas.ScoreRequest{}
				if format == "msgpack" {
					err = schemas.DecodeValid(data, e)
				} else if !strings.Contains(string(data), `"members":[{"sample_index":0,"image":"`) {
					err = errors.New(string(data))
				}
				if err != nil {
					t.Errorf("request: %v", err)
				}
				reply := map[string]any{"preferences": []any{map[string]any{"a": 1, "b": 0, "p": 0.75}}}
				out, err := msgpack.Marshal(reply)
				if format == "json" {
					out = []byte(`{"preferences": [{"a": 1, "b": 0, "p": 0.75}]}`)
				}
				if err == nil {
					_, err = w.Write(out)
				}
				if err != nil {
					t.Error(err)
				}
			}))
			t.Cleanup(s.Close)
			p := newPlane(t)
			cfg := testConfig()
			cfg.Scorers = file(t, fmt.Sprintf("http:\n  duel: {url: %q, format: %s, retry_wait: 10ms}\n", s.URL,
				format))
			p.serve(t, cfg)
			for i := range int64(2) {
				p.put(t, ofGroup(t, "g", i, 2, 2, "http:duel"))
			}
			got := p.rewards(t, "r", 2)
			if a, b := got["g.0"], got["g.1"]; a.Reward == nil || b.Reward == nil || *a.Reward != 0.25 ||
				*b.Reward != 0.75 || b.Scores[0].Detail != "won 0.75 of 1" {
				t.Errorf("%+v, %+v", a, b)
			}
		})
	}
}
