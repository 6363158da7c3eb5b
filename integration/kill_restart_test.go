package integration_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/integration/tools/harness"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/schemas"
)

// crew is a pipeline in this process whose services come and go one by one.
type crew struct {
	*world
	config  config
	serving map[string]*bustest.Service
}

// holder is the durable that has the rewards of a batch, or of a group without one.
func holder(batch string) string { return fmt.Sprintf("advantage-p%02d", schemas.Partition(batch)) }

func assemble(t *testing.T) *crew {
	t.Helper()
	return &crew{world: newWorld(t, bustest.TCP), config: defaults(), serving: map[string]*bustest.Service{}}
}

// up starts services, each with a connection of its own.
func (c *crew) up(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		c.serving[name] = c.Serve(t, c.config.run(name))
	}
}

// publish waits for intake's answer.
func (c *crew) publish(t *testing.T, run schemas.Run, p *schemas.Prompt) {
	t.Helper()
	if _, err := c.client.Publish(limited(t), run, p); err != nil {
		t.Fatalf("publish %s: %v", p.UID, err)
	}
}

func (c *crew) messages(t *testing.T, stream string) uint64 {
	t.Helper()
	return c.Info(t, stream).State.Msgs
}

// slowPrompt is a group that takes a while: small steps, many of them.
func slowPrompt(uid schemas.UID, n, steps int64) *schemas.Prompt {
	return &schemas.Prompt{
		UID: uid, Prompt: "image " + string(uid), GroupSize: &n, Seed: new(int64(3)),
		ImageSettings: schemas.ImageSettings{
			NumInferenceSteps: &steps,
			Height:            new(int64(64)), Width: new(int64(64)), Rollout: schemas.Rollout{SDEWindow: &schemas.SDEWindow{Size: 2}},
		},
	}
}

// A prompt that is published again, and everything delivered again from the start,
// change nothing.
func TestPipeline_EverythingDeliveredAgain(t *testing.T) {
	t.Parallel()
	const size, steps = 4, 6
	c := assemble(t)
	c.up(t, stages...)
	asked := map[schemas.UID]int64{"a": size, "b": size}
	for _, uid := range []schemas.UID{"a", "b", "a"} {
		c.publish(t, "r", slowPrompt(uid, size, steps))
	}
	c.advantages(t, "r", 2)
	c.publish(t, "r", slowPrompt("a", size, steps)) // of a group that has closed
	harness.AwaitIdle(t, c.Bus)
	first := harness.ReadBooks(t, c.Bus, "r")
	first.Check(t, asked, steps)

	for _, name := range stages {
		c.serving[name].Stop()
	}
	for _, stream := range []string{
		schemas.StreamPrompts, schemas.StreamRequests, schemas.StreamTrajectories,
		schemas.StreamRewards,
	} {
		s, err := c.JetStream().Stream(t.Context(), stream)
		if err != nil {
			t.Fatal(err)
		}
		names := s.ConsumerNames(t.Context())
		for name := range names.Name() {
			if err := s.DeleteConsumer(t.Context(), name); err != nil {
				t.Fatal(err)
			}
		}
		if err := names.Err(); err != nil {
			t.Fatal(err)
		}
	}
	c.up(t, stages...)
	bustest.Until(t, "rewards delivered again", func() error {
		_, consumers, err := bustest.Consumers(t, c.Bus, schemas.StreamRewards)
		if err != nil {
			return err
		}
		again := uint64(0)
		for _, info := range consumers {
			again += info.Delivered.Consumer
		}
		if again < 2*size {
			return fmt.Errorf("%d of %d", again, 2*size)
		}
		return nil
	})
	harness.AwaitIdle(t, c.Bus)
	again := harness.ReadBooks(t, c.Bus, "r")
	again.Check(t, asked, steps)
	again.Same(t, first)
	if again.Steps != first.Steps {
		t.Errorf("%d steps, before %d: samples that were there were made again", again.Steps, first.Steps)
	}
	harness.NoDead(t, c.Bus)
}

// putReward stores a reward, and before it, as intake does, the record of its group.
func putReward(t *testing.T, b *bus.Bus, r *schemas.Reward) {
	t.Helper()
	for _, e := range []schemas.Keyed{openingOf(r), r} {
		if _, err := b.Publish(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
}

// openingOf is the record of the group of a reward.
func openingOf(r *schemas.Reward) *schemas.Opening {
	return &schemas.Opening{
		Run: r.Run, UID: r.UID, GroupSize: r.GroupSize, PromptDigest: digest, Prompt: "a red fox", Lane: "synthetic",
		ScheduleDigest: digest, Group: r.Group,
	}
}

// rewardOf is a reward as the reward service publishes it.
func rewardOf(run schemas.Run, uid schemas.UID, i, n int64, value float64) *schemas.Reward {
	return &schemas.Reward{
		Run: run, UID: uid, SampleIndex: i, GroupSize: n, Status: schemas.StatusScored, Reward: &value,
		Scores: []schemas.Score{}, TrajectorySeq: uint64(i + 1), Trained: schemas.Trained{TrainedSteps: 2, ScheduleDigest: digest},
		Scored: time.Now().UnixNano(),
		Group: schemas.Group{
			Batch: string(uid), Created: time.Now().UnixNano(), PromptSeq: 1,
			Reward:    []schemas.RewardSpec{{Name: "synthetic", Weight: new(1.0), Required: new(true)}},
			Advantage: schemas.AdvantageSpec{Estimator: "flow_grpo", Std: "group", StdBasis: "sample", Epsilon: new(1e-4)},
		},
	}
}

// A reader that takes its time, here until everything is done, gets every step, in order, and holds up no one.
func TestPipeline_SlowReader(t *testing.T) {
	t.Parallel()
	const groups, size, steps = 4, 8, 12
	c := assemble(t)
	c.up(t, stages...)
	read, done := make(chan []uint64, 1), make(chan struct{})
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	go func() {
		var seqs []uint64
		for m, err := range c.Read(ctx, schemas.StreamSteps, nil, bus.ReadOptions{Live: true}) {
			if err != nil {
				t.Errorf("read: %v", err)
				break
			}
			select {
			case <-done:
			case <-ctx.Done():
			}
			if seqs = append(seqs, m.Seq); len(seqs) == groups*size*steps {
				break
			}
		}
		read <- seqs
	}()
	for i := range groups {
		c.publish(t, "r", slowPrompt(schemas.UID(fmt.Sprintf("g%d", i)), size, steps))
	}
	c.advantages(t, "r", groups)
	close(done)
	for i, seq := range bustest.Receive(t, "the slow reader", read) {
		if seq != uint64(i+1) {
			t.Fatalf("read sequence %d at %d: not every step once and in order", seq, i+1)
		}
	}
	if n := c.Server.SlowConsumers(); n != 0 {
		t.Errorf("%d clients were cut off for being slow", n)
	}
	harness.NoDead(t, c.Bus)
}

// resize changes how many messages a stream may hold.
func (c *crew) resize(t *testing.T, stream string, messages int64) {
	t.Helper()
	c.Change(t, stream, func(s *jetstream.StreamConfig) { s.MaxMsgs = messages })
}

func (c *crew) consumer(t *testing.T, stream, durable string) *jetstream.ConsumerInfo {
	t.Helper()
	consumer, err := c.JetStream().Consumer(t.Context(), stream, durable)
	if err != nil {
		t.Fatal(err)
	}
	return consumer.CachedInfo()
}

// inHand says whether a consumer has that many messages in hand.
func inHand(t *testing.T, b *bus.Bus, stream, durable string, least int) error {
	consumer, err := b.JetStream().Consumer(t.Context(), stream, durable)
	if err != nil {
		return err
	}
	if n := consumer.CachedInfo().NumAckPending; n < least {
		return fmt.Errorf("%d of %d in hand", n, least)
	}
	return nil
}

// fewWaits is an ack wait that a busy machine does not let lapse, and that a test can outlast twice.
const fewWaits = 4 * time.Second

// While the requests are full, intake waits with the prompts in hand: longer than the
// ack wait, without a redelivery, and without a dead letter.
func TestPipeline_RequestsFull(t *testing.T) {
	t.Parallel()
	const groups, size, steps, room = 6, 5, 4, 7
	c := assemble(t)
	c.config.intake.AckWait = fewWaits
	c.config.intake.Models = []schemas.Lane{"synthetic"}
	registry := prometheus.NewRegistry()
	c.config.intake.Metrics = registry
	c.up(t, "sampler") // announces the model
	bustest.Until(t, "the model is announced", func() error {
		policies, err := c.Policies(t.Context())
		if err == nil && len(policies) == 0 {
			err = errors.New("not yet")
		}
		return err
	})
	c.serving["sampler"].Stop()
	c.standIn(t, "synthetic")
	c.resize(t, schemas.StreamRequests, room)
	c.up(t, "intake", "reward", "advantage")
	asked := map[schemas.UID]int64{}
	for i := range groups {
		uid := schemas.UID(fmt.Sprintf("g%d", i))
		asked[uid] = size
		data, err := schemas.Encode(slowPrompt(uid, size, steps))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.PublishPrompt(t.Context(), "r", data, nil); err != nil {
			t.Fatal(err)
		}
	}
	bustest.Until(t, "the requests are full", func() error {
		if n := c.messages(t, schemas.StreamRequests); n != room {
			return fmt.Errorf("%d of %d", n, room)
		}
		return nil
	})
	bustest.Redelivers(t, c.Bus, 5*fewWaits/2)
	if n := c.messages(t, schemas.StreamRequests); n != room {
		t.Errorf("%d requests, want %d: as many as fit", n, room)
	}
	if info := c.consumer(t, schemas.StreamPrompts, "intake"); info.NumRedelivered != 0 || info.NumAckPending == 0 {
		t.Errorf("intake: %d redelivered, %d in hand; want none and some", info.NumRedelivered, info.NumAckPending)
	}
	if n := gathered(t, registry, "meander_intake_stalled_publishes"); n == 0 {
		t.Error("no publish counts as stalled")
	}
	c.up(t, "sampler")
	c.advantages(t, "r", groups)
	harness.AwaitIdle(t, c.Bus)
	k := harness.ReadBooks(t, c.Bus, "r")
	k.Check(t, asked, steps)
	if k.Steps != groups*size*steps {
		t.Errorf("%d steps, want %d: some sample was made twice", k.Steps, groups*size*steps)
	}
	if now, all := gathered(t, registry, "meander_intake_stalled_publishes"),
		gathered(t, registry, "meander_intake_publish_stall_seconds_total"); now != 0 || all <= 0 {
		t.Errorf("%v publishes stalled at the end and %v s of stalls; want none and some", now, all)
	}
	harness.NoDead(t, c.Bus)
}

// gathered is the sum of a counter or gauge.
func gathered(t *testing.T, r *prometheus.Registry, name string) (sum float64) {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return sum
}

// While what comes of samples or scores is full, the service before it waits with them in hand: nothing is made
// again, and nothing is delivered again.
func TestPipeline_ResultsFull(t *testing.T) {
	skipShort(t)
	t.Parallel()
	const groups, size, steps = 4, 4, 10
	for _, test := range []struct {
		full, from, durable string
		room                int64
		made                string
		want                float64
	}{
		{
			schemas.StreamTrajectories, schemas.StreamRequests, "sampler-synthetic", 3, "meander_sampler_steps_total",
			groups * size * steps,
		},
		{
			schemas.StreamRewards, schemas.StreamTrajectories, "reward", groups + 3, "meander_reward_score_seconds",
			groups * size,
		},
	} {
		t.Run(test.full, func(t *testing.T) {
			c := assemble(t)
			c.config.sampler.AckWait, c.config.reward.AckWait = fewWaits, fewWaits
			registry := prometheus.NewRegistry()
			c.config.sampler.Metrics, c.config.reward.Metrics = registry, registry
			c.resize(t, test.full, test.room)
			c.up(t, "intake", "sampler", "advantage")
			asked := map[schemas.UID]int64{}
			for i := range groups {
				p := slowPrompt(schemas.UID(fmt.Sprintf("g%d", i)), size, steps)
				asked[p.UID] = size
				c.publish(t, "r", p)
			}
			c.up(t, "reward") // the records of the groups have their room
			bustest.Until(t, "it is full and somebody waits", func() error {
				if n := c.messages(t, test.full); n != uint64(test.room) {
					return fmt.Errorf("%d of %d", n, test.room)
				}
				if c.consumer(t, test.from, test.durable).NumAckPending == 0 {
					return errors.New("nobody waits")
				}
				return nil
			})
			bustest.Redelivers(t, c.Bus, 5*fewWaits/2)
			c.resize(t, test.full, -1)
			c.advantages(t, "r", groups)
			harness.AwaitIdle(t, c.Bus)
			harness.ReadBooks(t, c.Bus, "r").Check(t, asked, steps)
			if n := gathered(t, registry, test.made); n != test.want {
				t.Errorf("%s is %v, want %v: something was made twice", test.made, n, test.want)
			}
			if info := c.consumer(t, test.from, test.durable); info.Delivered.Consumer != groups*size {
				t.Errorf("%d deliveries of %d: waiting cost tries", info.Delivered.Consumer, groups*size)
			}
			harness.NoDead(t, c.Bus)
		})
	}
}

// While the steps are full, the samplers wait with their samples in hand: longer than
// the ack wait, without a redelivery. When what has been used is purged, they go on.
func TestPipeline_StepsFull(t *testing.T) {
	t.Parallel()
	const groups, size, steps = 8, 4, 10
	const room = 3*size*steps + 7
	c := assemble(t)
	c.config.sampler.AckWait = fewWaits
	c.config.sampler.Batch, c.config.sampler.Workers = 4, 1
	registry := prometheus.NewRegistry()
	c.config.sampler.Metrics = registry
	c.resize(t, schemas.StreamSteps, room)
	c.up(t, stages...)
	asked := map[schemas.UID]int64{}
	for i := range groups {
		p := slowPrompt(schemas.UID(fmt.Sprintf("g%d", i)), size, steps)
		asked[p.UID] = size
		c.publish(t, "r", p)
	}
	full := func() error {
		if n := c.messages(t, schemas.StreamSteps); n != room {
			return fmt.Errorf("%d of %d steps", n, room)
		}
		return nil
	}
	bustest.Until(t, "the steps are full", full)
	bustest.Redelivers(t, c.Bus, 5*fewWaits/2)
	if err := full(); err != nil {
		t.Error(err)
	}
	if info := c.consumer(t, schemas.StreamRequests, "sampler-synthetic"); info.NumRedelivered != 0 ||
		info.NumAckPending == 0 {
		t.Errorf("sampler: %d redelivered, %d in hand; want none and some", info.NumRedelivered, info.NumAckPending)
	}
	if n := gathered(t, registry, "meander_sampler_publish_pending_bytes"); n == 0 {
		t.Error("no step counts as waiting to be stored")
	}

	purged := map[schemas.UID]bool{}
	waited, larger := 0, int64(room)
	bustest.Until(t, "every group closed", func() error {
		k := harness.ReadBooks(t, c.Bus, "r")
		s, err := c.JetStream().Stream(t.Context(), schemas.StreamSteps)
		if err != nil {
			return err
		}
		waited++
		for uid := range k.Advantages {
			if !purged[uid] {
				purged[uid], waited = true, 0
				if err := s.Purge(t.Context(),
					jetstream.WithPurgeSubject(string(schemas.Prefix+"step.r."+uid+".>"))); err != nil {
					return err
				}
			}
		}
		if waited > 0 && waited%100 == 0 { // all that is stored is of open groups: nothing can be purged
			larger += size * steps
			c.resize(t, schemas.StreamSteps, larger)
		}
		if len(purged) < groups {
			return fmt.Errorf("%d of %d; %d steps stored", len(purged), groups, k.Steps)
		}
		return nil
	})
	harness.AwaitIdle(t, c.Bus)
	k := harness.ReadBooks(t, c.Bus, "r")
	k.Steps = groups * size * steps // purged on the way
	k.Check(t, asked, steps)
	if info := c.consumer(t, schemas.StreamRequests, "sampler-synthetic"); info.Delivered.Consumer != groups*size {
		t.Errorf("%d deliveries of %d requests: waiting cost tries", info.Delivered.Consumer, groups*size)
	}
	harness.NoDead(t, c.Bus)
}
