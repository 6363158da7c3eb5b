package integration_test

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/rs/zerolog"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/sampler"
)

// forger is somebody who may read, store and delete steps, and knows no secret.
type forger struct {
	*world
	uid     schemas.UID
	attempt string // the true one
}

func (f *forger) subject(index int64) string {
	return schemas.StepSubject("cut", f.uid, 0, schemas.StageMain, f.attempt, index)
}

// step is a stored one of the true attempt, as it is: its tensors may be parts.
func (f *forger) step(t *testing.T, index int64) *schemas.Step {
	t.Helper()
	m, err := f.Last(t.Context(), schemas.StreamSteps, schemas.StepSubject("cut", f.uid, 0, schemas.StageMain, "*",
		index))
	if err != nil {
		t.Fatal(err)
	}
	return bustest.Decode[schemas.Step](t, m)
}

// put stores bytes on a subject, in the place of what is there.
func (f *forger) put(t *testing.T, subject string, data []byte) {
	t.Helper()
	f.remove(t, subject)
	if ack, err := f.PublishRaw(t.Context(), subject, data, nil, ""); err != nil || ack.Duplicate {
		t.Fatalf("forge %s: %+v, %v", subject, ack, err)
	}
}

func (f *forger) remove(t *testing.T, subject string) {
	t.Helper()
	if m, err := f.Last(t.Context(), schemas.StreamSteps, subject); err == nil {
		if err := f.Delete(t.Context(), schemas.StreamSteps, m.Seq); err != nil {
			t.Fatal(err)
		}
	}
}

// other is a step with other latents of the right size.
func other(s *schemas.Step) *schemas.Step {
	s.Latents = slices.Clone(s.Latents)
	for i := range s.Latents {
		data := bytes.Clone(s.Latents[i].Tensor.Data)
		data[0] ^= 1
		s.Latents[i].Tensor.Data = data
	}
	return s
}

// forgedSteps is how many of the steps are made before the sampler is killed: an undisturbed
// successor goes on from state 4.
const forgedSteps = 5

type forgery struct {
	name  string
	from  int64 // the state that is gone on from, all the same
	forge func(t *testing.T, f *forger)
}

func forgeries() []forgery {
	return []forgery{
		{"nothing", 4, func(*testing.T, *forger) {}},
		{"a later step of another attempt", 4, func(t *testing.T, f *forger) {
			for i := range int64(resumeSteps) {
				s := f.step(t, min(i, forgedSteps-1))
				s.StepIndex, s.Attempt, s.Latents[0].Index = i, "forged", i
				f.put(t, s.Subject(), bustest.Encode(t, other(s)))
			}
		}},
		{"a later step of the same attempt", 4, func(t *testing.T, f *forger) {
			s := f.step(t, 4)
			s.StepIndex, s.Latents[0].Index = 5, 5
			f.put(t, s.Subject(), bustest.Encode(t, s))
		}},
		{"other latents", 3, func(t *testing.T, f *forger) {
			f.put(t, f.subject(4), bustest.Encode(t, other(f.step(t, 4))))
		}},
		{"other latents at the beginning", 0, func(t *testing.T, f *forger) {
			f.put(t, f.subject(0), bustest.Encode(t, other(f.step(t, 0))))
		}},
		{"another log-prob", 2, func(t *testing.T, f *forger) {
			s := f.step(t, 3)
			*s.LogProb /= 2
			f.put(t, s.Subject(), bustest.Encode(t, s))
		}},
		{"steps of another sample", 0, func(t *testing.T, f *forger) {
			for i := range int64(forgedSteps) {
				s := (&forger{world: f.world, uid: "u0"}).step(t, i)
				s.UID, s.Attempt = f.uid, f.attempt
				f.put(t, s.Subject(), bustest.Encode(t, s))
			}
		}},
		{"the true steps, said to be of another attempt", 4, func(t *testing.T, f *forger) {
			for i := range int64(forgedSteps) {
				s := f.step(t, i)
				f.remove(t, s.Subject())
				s.Attempt = "copied"
				f.put(t, s.Subject(), bustest.Encode(t, s))
			}
		}},
		{"a step that is gone", 1, func(t *testing.T, f *forger) { f.remove(t, f.subject(2)) }},
		{"steps without a seal, as of an older build", 0, func(t *testing.T, f *forger) {
			for i := range int64(forgedSteps) {
				s := f.step(t, i)
				s.Seal = ""
				f.put(t, s.Subject(), bustest.Encode(t, s))
			}
		}},
		{"bytes", 2, func(t *testing.T, f *forger) { f.put(t, f.subject(3), []byte("rubbish")) }},
		{"half of an event", 3, func(t *testing.T, f *forger) {
			data := bustest.Encode(t, f.step(t, 4))
			f.put(t, f.subject(4), data[:len(data)/2])
		}},
		{"more attempts than anybody makes", 0, func(t *testing.T, f *forger) {
			for i := range 75 {
				for index := range int64(resumeSteps) {
					s := f.step(t, 0)
					s.StepIndex, s.Attempt, s.Latents[0].Index = index, fmt.Sprint("forged-", i), index
					f.put(t, s.Subject(), bustest.Encode(t, s))
				}
			}
		}},
	}
}

// forgedParts are of steps whose latents travel apart.
func forgedParts() []forgery {
	return []forgery{
		{"a part that is gone", 3, func(t *testing.T, f *forger) {
			f.remove(t, schemas.PartSubject(f.subject(4), 0))
		}},
		{"a part with other bytes", 3, func(t *testing.T, f *forger) {
			subject := schemas.PartSubject(f.subject(4), 0)
			m, err := f.Last(t.Context(), schemas.StreamSteps, subject)
			if err != nil {
				t.Fatal(err)
			}
			data := bytes.Clone(m.Data)
			data[len(data)/2] ^= 1
			f.put(t, subject, data)
		}},
		{"half of a part", 2, func(t *testing.T, f *forger) {
			subject := schemas.PartSubject(f.subject(3), 0)
			m, err := f.Last(t.Context(), schemas.StreamSteps, subject)
			if err != nil {
				t.Fatal(err)
			}
			f.put(t, subject, m.Data[:len(m.Data)/2])
		}},
	}
}

// What is on the subjects of steps counts only where a sampler sealed it for this request,
// whatever put it there: the content is that of a calm run, and what is true is still used.
func TestResume_Forged(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.Serve(t, defaults().run("intake"))
	b := &brake{after: map[string]int{}, taken: map[string]int{}, release: make(chan struct{})}
	var prompts []*schemas.Prompt
	messages := uint64(0)
	all := slices.Concat(forgeries(), forgedParts())
	for i, c := range all {
		p := resumeCase{name: c.name}.prompt(forgedSteps)
		p.UID = schemas.UID(fmt.Sprint("u", i))
		messages += forgedSteps
		if i >= len(forgeries()) { // latents of 256 KiB, which do not fit beside the rest
			p.Height, p.Width, p.Rollout.Debug = new(int64(512)), new(int64(512)),
				[]string{"noise", "mean", "model_output"}
			messages += forgedSteps
		}
		b.after[p.Prompt] = forgedSteps
		prompts = append(prompts, p)
	}
	var killed *bus.Bus
	first := w.Serve(t, func(ctx context.Context, own *bus.Bus) error {
		killed = own
		return sampler.Run(ctx, resumeConfig(b, len(prompts)), own, zerolog.Nop())
	})
	publish(t, w, "cut", prompts...)
	b.holds(t, w, len(prompts), messages)
	b.releasedWhenClosed(killed)
	first.Kill()
	for i, c := range all {
		f := &forger{world: w, uid: prompts[i].UID}
		f.attempt = f.step(t, 0).Attempt
		c.forge(t, f)
	}

	w.sampler(t, resumeConfig(nil, 4))
	publish(t, w, "calm", prompts...)
	for i, c := range all {
		t.Run(c.name, func(t *testing.T) {
			var content [2][32]byte
			var got *schemas.Trajectory
			for k, run := range []schemas.Run{"calm", "cut"} {
				for _, m := range bustest.Await(t, w.Bus, 1, schemas.StreamTrajectories,
					schemas.TrajectorySubject(run, prompts[i].UID, 0, schemas.StageMain)) {
					got = bustest.Decode[schemas.Trajectory](t, m)
				}
				var err error
				if content[k], err = schemas.ContentDigest(got); err != nil || got.StopReason != schemas.StopCompleted {
					t.Fatalf("run %s: %v, %s %s", run, err, got.StopReason, got.Error)
				}
			}
			if content[0] != content[1] {
				t.Error("the digest is not that of the calm run")
			}
			taken := int64(0)
			for _, ref := range got.Steps {
				if ref.Attempt != "" {
					taken++
				}
			}
			if taken != c.from {
				t.Errorf("%d steps were taken over, want %d", taken, c.from)
			}
			if _, err := w.client.Steps(t.Context(), got); err != nil {
				t.Error(err)
			}
		})
	}
}
