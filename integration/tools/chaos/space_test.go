package chaos_test

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
)

// Each update is a batch of 2 groups of 2 samples, 1.25 MiB of steps each.
const (
	updates, groupsEach, samplesEach = 20, 2, 2
	spaceOfTwo                       = 12 << 20
)

// askForUpdates publishes the prompts of all updates of a run.
func askForUpdates(t *testing.T, b *bus.Bus, run schemas.Run, free bool) {
	t.Helper()
	for batch := range updates {
		for group := range groupsEach {
			p := &schemas.Prompt{
				UID: schemas.UID(fmt.Sprintf("u%02d-%d", batch, group)), Prompt: "a red fox", Seed: new(int64(7)),
				GroupSize: new(int64(samplesEach)), FreeReadSteps: free,
				Batch: &schemas.BatchSpec{ID: fmt.Sprintf("b%02d", batch), Groups: groupsEach},
			}
			p.NumInferenceSteps, p.Height, p.Width = new(int64(4)), new(int64(512)), new(int64(512))
			bustest.Until(t, "a prompt is stored", func() error {
				_, err := client.New(b).Publish(t.Context(), run, p)
				return err
			})
		}
	}
}

// readUpdates reads the batches of a run as a trainer does, with all of their steps, and acknowledges each. before is
// called with each batch that is read and not yet acknowledged. It returns the digests of all samples by batch.
func readUpdates(t *testing.T, b *bus.Bus, run schemas.Run, before func(read int)) map[string][]string {
	t.Helper()
	var trainer jetstream.Consumer
	bustest.Until(t, "a reader", func() (err error) {
		trainer, err = b.JetStream().CreateOrUpdateConsumer(t.Context(), schemas.StreamAdvantages,
			jetstream.ConsumerConfig{
				Durable: "trainer-" + string(run), AckPolicy: jetstream.AckExplicitPolicy, AckWait: 2 * time.Second,
				FilterSubject: schemas.BatchSubject(run, "*"), MaxAckPending: 1,
			})
		return err
	})
	ctx, moved := bustest.WhileItMoves(t)
	c, out, read := client.New(b), map[string][]string{}, 0
	for len(out) < updates {
		m, err := trainer.Next(jetstream.FetchMaxWait(time.Second))
		if ctx.Err() != nil {
			t.Fatalf("after %d of %d batches of %s: %v", len(out), updates, run, err)
		}
		if err != nil { // none yet, or the server is away
			continue
		}
		moved()
		var e schemas.Batch
		if err := schemas.DecodeValid(m.Data(), &e); err != nil {
			t.Fatal(err)
		}
		if out[e.Batch] != nil { // its acknowledgement is stored, and the answer was lost: its steps may be freed
			_ = m.Ack()
			continue
		}
		var digests []string
		bustest.Until(t, "the samples of batch "+e.Batch, func() error {
			digests = nil
			for _, uid := range e.UIDs {
				for i := range int64(samplesEach) {
					sample, err := c.Trajectory(t.Context(), run, uid, i)
					if err != nil {
						return err
					}
					if _, err := c.Steps(t.Context(), sample); err != nil {
						return fmt.Errorf("%s #%d: %w", uid, i, err)
					}
					digests = append(digests, sample.ContentDigest)
				}
			}
			return nil
		})
		if read++; before != nil {
			before(read)
		}
		if err := m.DoubleAck(ctx); err != nil {
			t.Logf("batch %s comes again: %v", e.Batch, err)
		}
		out[e.Batch] = digests
	}
	return out
}

// Twenty updates fit in the space of two where their steps go once they are read, though pipeline, or server, is killed
// in the middle: a reader gets the batches that it gets with ample space and without a fault. A run whose prompts do
// not say so keeps its steps.
func TestSpace_TwentyUpdatesInThatOfTwo(t *testing.T) {
	if harness.Race {
		t.Skip("TestSpace: of programs that are not built with -race; it runs without")
	}
	for _, cluster := range []bool{false, true} {
		t.Run(map[bool]string{false: "one server", true: "a cluster"}[cluster], func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			url, args := "", []string{
				"up", "--model", "synthetic", "--batch", "2", "--workers", "1", "--max-steps-bytes",
				fmt.Sprintf("%dB", spaceOfTwo), "--gc-every", "100ms", "--ack-wait", ackWait.String(),
			}
			var servers map[string]*harness.Process
			if cluster {
				url, servers = newCluster(t)
				args = append(args, "--nats", url, "--stream-replicas", "3")
			} else {
				address := harness.FreeAddress(t)
				url, args = "nats://"+address, append(args, "--listen", address, "--store", filepath.Join(dir, "store"))
			}
			up := harness.Raise(t, &harness.Process{
				Name: "up", Path: harness.Program(t, "meander"), Dir: dir, Args: args,
			})
			b := bustest.Connect(t, bus.Config{URL: url, Name: "trainer", ConnectTimeout: -1})
			bustest.Until(t, "the streams are there", func() error { return b.Ready(t.Context()) })
			askForUpdates(t, b, "train", true)
			got := readUpdates(t, b, "train", func(read int) {
				switch {
				case read == updates/2:
					up.Kill()
				case read == updates*3/4 && cluster:
					servers[leaderOf(t, b, schemas.StreamSteps)].KillFor(t)()
				}
			})
			kept := func(run schemas.Run) (n int) {
				bustest.Until(t, "what is stored", func() error {
					stored, err := b.Subjects(t.Context(), schemas.StreamSteps, schemas.StepsFilter(run, "*", "*", "*"))
					n = len(stored)
					return err
				})
				return n
			}
			bustest.Until(t, "all steps are freed", func() error {
				if n := kept("train"); n > 0 {
					return fmt.Errorf("%d are left", n)
				}
				return nil
			})
			bustest.Until(t, "ample space", func() error {
				return b.SetLimits(t.Context(), bus.StreamLimit{Stream: schemas.StreamSteps, MaxBytes: 1 << 30})
			})
			askForUpdates(t, b, "calm", false)
			calm := readUpdates(t, b, "calm", nil)
			if !maps.EqualFunc(got, calm, slices.Equal) {
				t.Errorf("read\n%v\nwith ample space\n%v", got, calm)
			}
			if kept("calm") == 0 {
				t.Error("the steps of a run that does not say so are freed")
			}
			info, err := b.StreamInfo(t.Context(), schemas.StreamSteps)
			if err != nil || info.State.Bytes < spaceOfTwo*updates*3/4/2 {
				t.Errorf("%d updates take %d bytes, %v; must be far more than %d", updates, info.State.Bytes, err,
					spaceOfTwo)
			}
			harness.NoDead(t, b)
		})
	}
}
