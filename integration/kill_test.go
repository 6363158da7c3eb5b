package integration_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/schemas"
)

const (
	// killAckWait is how soon another replica gets what a dead one had in hand.
	killAckWait = time.Second
	// killSteps of each sample, and the samples of each group.
	killSteps, killGroup = 20, 6
	// killWindow is how many groups are open at any time: there is always work in hand.
	killWindow = 5
)

// Processes of the pipeline, its server among them, are killed and paused at random
// while groups are published. Every group must come out once, complete, and equal to
// what it is without kills, bit for bit.
func TestKill(t *testing.T) {
	kills, r := soak(t, 20, 200), disturbance(t)
	if raceEnabled && soakSeed(t) == 0 {
		t.Skip("built with -race the programs start too slowly for kills every half second; make soak runs it")
	}

	url, server := mortalServer(t)
	victims := killVictims(t, url, server)
	b := bustest.Connect(t, bus.Config{URL: url, Name: "kill-test"})
	if err := b.Ready(limited(t)); err != nil {
		t.Fatal(err)
	}
	f := &feed{client: client.New(b), run: "kill", open: make(chan struct{}, killWindow), asked: map[schemas.UID]int64{}, closed: map[schemas.UID]bool{}}
	stop := f.start(t)
	pauses := torment(r, victims, kills)
	unacked(t, b)
	victims[len(victims)-1].kill()
	stop()
	f.wait(t)
	redelivered := settled(t, b)
	t.Logf("%d groups of %d", len(f.asked), killGroup)

	got := readBooks(t, b, f.run)
	got.check(t, f.asked, killSteps)
	noDead(t, b)
	verify(t, url, f.run, len(f.asked)*killGroup)
	doubled := 0
	bustest.Until(t, "the naive worker copies everything", func() error {
		found := subjects(t, b, naiveStream, naiveSubject+">")
		if len(found) != len(got.trajectories) {
			return fmt.Errorf("%d of %d", len(found), len(got.trajectories))
		}
		return nil
	})
	if doubled = duplicates(t, b, naiveStream, naiveSubject+">"); doubled == 0 {
		t.Error("the naive worker stored nothing twice: these kills prove nothing")
	}
	services := victims[1 : len(victims)-1]
	for _, v := range services {
		v.end(syscall.SIGTERM)
	}
	for _, v := range services {
		v.bury(t)
		for _, death := range v.deaths {
			t.Errorf("%s %s", v.name, death)
		}
	}
	stored := len(got.digests)
	refused := logged(t, victims, "trajectory stored", "reward stored", "group closed") - stored
	t.Logf("%d kills (%d of the server) and %d pauses; %d redeliveries; %d duplicates refused; %d steps of attempts that came to nothing; the naive worker stored %d twice",
		kills, server.starts-1, pauses, redelivered, max(0, refused), got.steps-len(got.trajectories)*killSteps, doubled)

	calm := start(t, nil)
	for i := range len(f.asked) {
		if _, err := calm.client.Publish(limited(t), "calm", killPrompt(i)); err != nil {
			t.Fatal(err)
		}
	}
	calm.advantages(t, "calm", len(f.asked))
	got.same(t, readBooks(t, calm.Bus, "calm"))
}

// killVictims are the server, two of each service but intake, and the naive worker.
func killVictims(t *testing.T, url string, server *victim) []*victim {
	t.Helper()
	victims := []*victim{server}
	dir := t.TempDir()
	for _, name := range []string{"intake", "sampler", "sampler", "reward", "reward", "advantage", "advantage"} {
		v := &victim{name: fmt.Sprintf("%s-%d", name, len(victims)), path: program(t, "meander-"+name), dir: dir, args: []string{
			"--nats-url", url, "--health-addr", "", "--ack-wait", killAckWait.String(),
		}}
		if name == "sampler" {
			v.args = append(v.args, "--model", "synthetic", "--batch", "2", "--workers", "1")
		}
		victims = append(victims, raise(t, v))
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return append(victims, raise(t, &victim{name: "naive", path: self, dir: dir, env: []string{naiveEnv + "=" + url}}))
}

// unacked waits until the naive worker has published more than it has acked: killed then,
// it must store something twice.
func unacked(t *testing.T, b *bus.Bus) {
	t.Helper()
	bustest.Until(t, "the naive worker has something in hand", func() error {
		published := len(subjects(t, b, naiveStream, naiveSubject+">"))
		s, err := b.JetStream().Stream(t.Context(), schemas.StreamTrajectories)
		if err != nil {
			return err
		}
		c, err := s.Consumer(t.Context(), "naive")
		if err != nil {
			return err
		}
		info := c.CachedInfo()
		if acked := int(s.CachedInfo().State.Msgs) - int(info.NumPending) - info.NumAckPending; published <= acked {
			return fmt.Errorf("%d acked, %d published", acked, published)
		}
		return nil
	})
}

// torment kills or pauses a victim about three times a second. Which one is drawn from
// a shuffled pack with the server in it twice, so that each gets its share.
func torment(r *rand.Rand, victims []*victim, kills int) (pauses int) {
	server := victims[0]
	var pack []*victim
	for kills > 0 {
		time.Sleep(time.Duration(250+r.IntN(250)) * time.Millisecond)
		if len(pack) == 0 {
			pack = append(append(pack, victims...), server)
			r.Shuffle(len(pack), func(i, j int) { pack[i], pack[j] = pack[j], pack[i] })
		}
		v := pack[0]
		pack = pack[1:]
		if v.env == nil && r.IntN(4) == 0 { // the negative control is always killed
			v.pause(killAckWait + time.Duration(200+r.IntN(1000))*time.Millisecond)
			pauses++
			continue
		}
		v.kill()
		kills--
	}
	return pauses
}

// feed publishes groups as others close.
type feed struct {
	client *client.Client
	run    schemas.Run
	open   chan struct{}

	mu     sync.Mutex
	asked  map[schemas.UID]int64
	closed map[schemas.UID]bool
}

// start publishes until the returned function is called, which returns when every
// prompt is stored.
func (f *feed) start(t *testing.T) (stop func()) {
	ctx, end := context.WithCancel(t.Context())
	var work sync.WaitGroup
	go func() {
		for g, err := range f.client.Groups(t.Context(), f.run, "") {
			if err != nil {
				t.Errorf("advantages: %v", err)
				return
			}
			f.mu.Lock()
			f.closed[g.UID] = true
			f.mu.Unlock()
			<-f.open
		}
	}()
	work.Go(func() {
		for i := 0; ; i++ {
			select {
			case f.open <- struct{}{}:
			case <-ctx.Done():
				return
			}
			p := killPrompt(i)
			f.mu.Lock()
			f.asked[p.UID] = killGroup
			f.mu.Unlock()
			work.Go(func() { f.publish(t, p) })
			if i%5 == 0 { // a client that is not sure publishes twice
				work.Go(func() { f.publish(t, p) })
			}
		}
	})
	return func() {
		end()
		work.Wait()
	}
}

// publish until the prompt is stored; whether intake lives to answer does not matter.
func (f *feed) publish(t *testing.T, p *schemas.Prompt) {
	for t.Context().Err() == nil {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		_, err := f.client.Publish(ctx, f.run, p)
		cancel()
		var refused *client.RefusedError
		switch {
		case err == nil, errors.Is(err, client.ErrNoAnswer):
			return
		case errors.As(err, &refused):
			t.Errorf("prompt %s: %v", p.UID, err)
			return
		}
	}
}

func (f *feed) wait(t *testing.T) {
	t.Helper()
	bustest.Until(t, "all groups closed", func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		for uid := range f.asked {
			if !f.closed[uid] {
				return fmt.Errorf("%d of %d", len(f.closed), len(f.asked))
			}
		}
		return nil
	})
}

func killPrompt(i int) *schemas.Prompt {
	return &schemas.Prompt{
		UID: schemas.UID(fmt.Sprintf("g%d", i)), Prompt: fmt.Sprintf("image %d", i), GroupSize: new(int64(killGroup)), Seed: new(int64(7)),
		Height: new(int64(128)), Width: new(int64(128)), NumInferenceSteps: new(int64(killSteps)),
		Rollout: schemas.Rollout{SDEWindow: &schemas.SDEWindow{Size: 3}},
	}
}
