package integration_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// hostile are payloads that are no event.
func hostile() map[string][]byte {
	good, err := schemas.Encode(&schemas.Prompt{Prompt: "a red fox"})
	if err != nil {
		panic(err)
	}
	bin := append([]byte{0x81, 0xa6, 'p', 'r', 'o', 'm', 'p', 't', 0xc6},
		binary.BigEndian.AppendUint32(nil, 1<<32-1)...)
	list := append([]byte{0x81, 0xa6, 's', 'i', 'g', 'm', 'a', 's', 0xdd},
		binary.BigEndian.AppendUint32(nil, 100_000_000)...)
	table := append([]byte{0xdf}, binary.BigEndian.AppendUint32(nil, 15_700_000)...)
	return map[string][]byte{
		"nothing":              {},
		"text":                 []byte("a red fox"),
		"json that breaks off": []byte(`{"prompt": "a red fox"`),
		"cut off":              good[:len(good)-3],
		"trailing bytes":       append(slices.Clone(good), 0),
		"4 GiB in 13 bytes":    bin,
		"100 M list items":     list,
		"15 M map keys":        table,
		"deep nesting":         bytes.Repeat([]byte{0x91}, 900_000),
		"deep nested maps":     bytes.Repeat([]byte{0x81, 0xa1, 'a'}, 250_000),
		"extension type":       {0x81, 0xa6, 'p', 'r', 'o', 'm', 'p', 't', 0xd4, 0x01, 0x00},
		"key of another type":  {0x81, 0x01, 0x02},
		"nil":                  {0xc0},
	}
}

// Hostile bytes on every subject end in the dead letters, and the pipeline goes on.
func TestPipeline_HostileBytes(t *testing.T) {
	t.Parallel()
	w := start(t, func(c *config) { c.sampler.Batch = 4 })
	subjects := map[string]string{
		"intake":    schemas.PromptSubject("evil"),
		"sampler":   schemas.RequestSubject("evil", "synthetic", "u%d", 0, schemas.StageMain),
		"reward":    schemas.TrajectorySubject("evil", "u%d", 0, schemas.StageMain),
		"advantage": schemas.RewardSubject("evil", "u%d", "u%d", 0),
	}
	want := map[string]int{}
	i := 0
	for name, data := range hostile() {
		for stage, subject := range subjects {
			if stage == "advantage" {
				subject = fmt.Sprintf(subject, i, i)
			} else if stage != "intake" {
				subject = fmt.Sprintf(subject, i)
			}
			if _, err := w.PublishRaw(t.Context(), subject, data, nil,
				fmt.Sprintf("evil-%s-%d", stage, i)); err != nil {
				t.Fatalf("%s at %s: %v", name, stage, err)
			}
			want[stage]++
			i++
		}
	}
	got := map[string]int{}
	for _, d := range bustest.Dead(t, w.Bus, i) {
		got[d.Service]++
		if d.Code != schemas.CodeDecode || d.Reason == "" {
			t.Errorf("dead letter of %s: code %q, reason %q; want %s and a reason", d.OriginalSubject, d.Code, d.Reason,
				schemas.CodeDecode)
		}
	}
	for stage, n := range want {
		if got[stage] != n {
			t.Errorf("%d dead letters of %s, want %d", got[stage], stage, n)
		}
	}
	r, err := w.client.Publish(t.Context(), "fine", &schemas.Prompt{
		UID: "g", Prompt: "a red fox", GroupSize: new(int64(2)),
	})
	if err != nil || r.Samples != 2 {
		t.Fatalf("a good prompt after them: %+v, %v", r, err)
	}
	if a := w.advantages(t, "fine", 1)["g"]; a == nil || a.Status != schemas.StatusComplete {
		t.Errorf("the good group: %+v", a)
	}
}

// digest stands for a schedule.
const digest = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

// A deadline holds whatever becomes of the sampler: it is stopped at the first samples, or
// there is none at all; one that comes back makes nothing of the group.
func TestPipeline_DeadlineWithoutSampler(t *testing.T) {
	t.Parallel()
	const many = 200 // more than a sampler ends in hand
	c := assemble(t)
	c.up(t, "intake", "sampler", "reward", "advantage")
	c.services(t, schemas.ServiceSampler, 1)
	due := func(p *schemas.Prompt, wait time.Duration) *schemas.Prompt {
		p.Deadline = new(time.Now().Add(wait).UnixNano())
		return p
	}
	// A prompt must be taken up before its deadline. On a busy machine that needs a later one, and a run of its own.
	run, wait := schemas.Run("r"), 5*time.Second
	for tooLate(t, c.client, run, due(slowPrompt("stopped", many, 900), wait)) {
		if run, wait = run+"r", 2*wait; wait > bustest.Patience {
			t.Fatalf("not taken up within %v", bustest.Patience)
		}
	}
	c.serving["sampler"].Stop()
	none := due(slowPrompt("none", 3, 4), wait)
	none.Batch = &schemas.BatchSpec{ID: "b", Groups: 1}
	data, err := schemas.Encode(none)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.PublishPrompt(t.Context(), run, data, nil); err != nil {
		t.Fatal(err)
	}
	closed := c.advantages(t, run, 2)
	stopped := closed["stopped"]
	if s := stopped.Status; s != schemas.StatusFailed && s != schemas.StatusPartial || len(stopped.Members) != many {
		t.Errorf("stopped: %s with %d members", s, len(stopped.Members))
	}
	if a := closed["none"]; a.Status != schemas.StatusFailed && a.Status != schemas.StatusRefused || a.Error == "" ||
		len(a.Members) != 3 {
		t.Errorf("none: %+v", a)
	}
	if b := c.batch(t, run, "b"); b.Groups != 0 || b.Status == schemas.StatusComplete {
		t.Errorf("batch %+v", b)
	}
	// What no one has sampled is taken back, or let go by a sampler that comes back: it makes others.
	made := len(harness.Subjects(t, c.Bus, schemas.StreamTrajectories, schemas.TrajectoryFilter(run, "stopped")))
	if made == many {
		t.Error("every sample had ended before the sampler was stopped; make them more")
	}
	c.up(t, "sampler")
	bustest.Until(t, "no request is left", func() error {
		if n := c.messages(t, schemas.StreamRequests); n > 0 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	c.publish(t, run, slowPrompt("after", 2, 4))
	closed = c.advantages(t, run, 3)
	if a := closed["after"]; a.Status != schemas.StatusComplete {
		t.Errorf("after: %+v", a)
	}
	harness.AwaitIdle(t, c.Bus)
	if n := len(harness.Subjects(t, c.Bus, schemas.StreamTrajectories,
		schemas.TrajectoryFilter(run, "stopped"))); n != made {
		t.Errorf("stopped: %d trajectories, %d when it had closed", n, made)
	}
	if a := closed["stopped"]; a.Status != stopped.Status || a.Status == schemas.StatusComplete {
		t.Errorf("stopped: %s, and %s afterwards", stopped.Status, a.Status)
	}
}

// batch waits for the result of a batch.
func (c *crew) batch(t *testing.T, run schemas.Run, id string) *schemas.Batch {
	t.Helper()
	subject := schemas.BatchSubject(run, id)
	bustest.Until(t, "batch "+id, func() error {
		_, err := c.Last(t.Context(), schemas.StreamAdvantages, subject)
		return err
	})
	return harness.ReadBooks(t, c.Bus, run).Batches[id]
}
