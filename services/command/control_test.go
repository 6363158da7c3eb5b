package command

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/bus/bustest"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/schemas"
)

// A run is paused, resumed and cancelled by commands, each of which says what came of it.
func TestControl(t *testing.T) {
	inEmptyDir(t)
	serving(t, "--model", "synthetic")
	large := []string{
		"publish", "--run", "r", "-n", "64", "--steps", "200", "--return-steps", "200", "--height", "512",
		"--width", "512", "a red fox",
	}
	expect(t, exitOK, "accepted  p1  64 samples", large...)
	expect(t, exitOK, "run r: running\n", "status")
	expect(t, exitUsage, "run: s; must be one of the 1 there are: r", "pause", "s")
	expect(t, exitUsage, "uid: p7; must be one of the 1 groups of run r: p1", "cancel", "r", "p7")
	expect(t, exitUsage, `run: "a b"; must be`, "pause", "a b")
	expect(t, exitUsage, "0 arguments; must be 'meander pause RUN'", "pause")
	expect(t, exitOK, "run r is paused: the sampler does not work on it any more\ncontinue it with: meander resume r\n",
		"pause", "r", "--by", "ada", "--reason", "lunch")
	expect(t, exitOK, "nothing to pause: run r was paused by ada at ", "pause", "r")
	lines := linesOf(t, expect(t, exitOK, "", "status", "r", "--json"))
	if s, ok := lines[0]["status"].(map[string]any); !ok || s["state"] != "paused" || s["by"] != "ada" ||
		s["reason"] != "lunch" {
		t.Errorf("status %v", lines)
	}
	expect(t, exitOK, "run r: paused by ada at ", "show", "--run", "r")
	expect(t, exitOK, "lunch; continue it with: meander resume r\n", "streams")
	bustest.Until(t, "all requests parked", func() error {
		if said := expect(t, exitOK, "", "status", "r"); !strings.Contains(said, "0 in the queue or in flight, ") {
			return errNotYet
		}
		return nil
	})
	expect(t, exitOK, "parked requests back in the queue", "resume", "r")
	expect(t, exitOK, "nothing to resume: the run is not paused", "resume", "r")
	expect(t, exitOK, "run r is cancelled: ", "cancel", "r", "--by", "ada")
	bustest.Until(t, "a result of the group", func() error {
		if said := expect(t, exitOK, "", "status", "r"); !strings.Contains(said, "1 of 1 have their result") {
			return errNotYet
		}
		return nil
	})
	expect(t, exitOK, "run r: cancelled by ada at ", "status", "r")
	expect(t, exitOK, "p1   cancelled", "show", "--run", "r")
	expect(t, exitFailed, "run r was cancelled by ada at ", "publish", "--run", "r", "another fox")
	expect(t, exitOK, "control    pause of run r by ada: lunch", "watch", "--run", "r", "--kinds", "control", "--count",
		"5")
}

// A control without an answer is stored, and the command says so.
func TestControl_NoAnswer(t *testing.T) {
	inStore(t)
	expect(t, exitFailed, "pause of run r1: no intake answered in 1s; the request is stored, and the next intake "+
		"that runs answers it", "pause", "r1")
	expect(t, exitOK, "run r1: complete\n", "status", "r1")
	expect(t, exitUsage, `RUN: "r2"; nothing is stored of it`, "status", "r2")
	expect(t, exitUsage, "--wait: 0s; must be above 0", "pause", "r1", "--wait", "0")
	expect(t, exitUsage, "--wait: -1s; must be above 0", "publish", "--wait=-1s", "x")
	// What is not there needs no intake to say so.
	expect(t, exitUsage, "run: r2; must be one of the 1 there are: r1", "cancel", "r2")
	expect(t, exitUsage, "uid: q; must be one of the 1 groups of run r1: p", "cancel", "r1", "q")
	expect(t, exitUsage, "uid: q; must be one of the 1 groups of run r1: p", "prune", "r1", "q", "0")
	expect(t, exitUsage, "sample_index: 2; must be below 2, the samples of group p", "prune", "r1", "p", "2")
	if n := len(linesOf(t, expect(t, exitOK, "", "watch", "--run", "r1", "--kinds", "control", "--json", "--count",
		"1"))); n != 1 {
		t.Errorf("%d controls are stored; want the pause alone", n)
	}
}

// The state of a run names the function that it waits for, and says why, while there is no worker.
func TestStatus_FunctionAway(t *testing.T) {
	inEmptyDir(t)
	serving(t, "--model", "synthetic")
	expect(t, exitOK, "accepted", "publish", "--run", "r", "-n", "2", "--steps", "2", "--reward", "nats:nobody",
		"a red fox")
	bustest.Until(t, "the reason", func() error {
		said := expect(t, exitOK, "", "status", "r")
		if !strings.Contains(said, "2 samples wait for a score; reward-") ||
			!strings.Contains(said, ": nats:nobody: not available now: no worker listens on mdr.v1.score.nobody\n") {
			return errNotYet
		}
		return nil
	})
	expect(t, exitOK, "waits, or did when it asked last: nats:nobody: ", "doctor")
}

// The state of a run says what it waits for, also while it waits: a prompt that no service takes.
func TestStatus_Waits(t *testing.T) {
	inStore(t)
	b := connected(t)
	if _, err := b.PublishPrompt(t.Context(), "r2", []byte("x"), nil); err != nil {
		t.Fatal(err)
	}
	const why = "No sampler and no reward service is running. This is what is stored"
	said := expect(t, exitOK, "run r2: running, waiting for a sampler\n", "status", "r2")
	if !strings.Contains(said, "  waits     "+why+"\n            -> Start the pipeline: 'meander up'\n") {
		t.Errorf("status: %s", said)
	}
	expect(t, exitOK, "1 of 1 have their result: 1 complete\n", "status", "r1")

	prompts := []results.Prompt{{UID: "p"}}
	var out text
	p := newProgress(&out, false, "r2", prompts, results.NewOutcomes(prompts), &loading{})
	p.expect(2)
	ctx, stop := context.WithCancel(t.Context())
	var explaining sync.WaitGroup
	explaining.Go(func() { p.explainWaits(ctx, b.Bus, 10*time.Millisecond) })
	bustest.Until(t, "a reason", func() error {
		if !strings.Contains(out.String(), "waiting: "+why+". Start the pipeline: 'meander up'\n") {
			return errNotYet
		}
		return nil
	})
	stop()
	explaining.Wait()
	p.end()
	if n := strings.Count(out.String(), why); n != 1 {
		t.Errorf("the reason is given %d times: %s", n, &out)
	}
}

// Samples that were pruned have an event in the place of their reward, and no reward.
func TestStatus_Pruned(t *testing.T) {
	inEmptyDir(t)
	expect(t, exitFailed, "0 of 1 groups complete", "run", "--run", "r1", "--model", "synthetic", "-n", "2", "--steps",
		"3",
		"--prune-step", "1", "--prune-log-prob-above=-1e9", "--out", "-", "a red fox")
	expect(t, exitOK, "samples   0 made, 0 with their reward, 2 ended without one\n", "status", "r1")
	status := linesOf(t, expect(t, exitOK, "", "status", "r1", "--json"))[0]["status"].(map[string]any)
	if status["trajectories"] != 0.0 || status["failed"] != 2.0 || status["rewards"] != 0.0 {
		t.Errorf("%v; want two samples that were ended, and no reward", status)
	}
	prompts := []results.Prompt{{UID: "0000-a-red-fox"}}
	var out text
	p := newProgress(&out, false, "r1", prompts, results.NewOutcomes(prompts), &loading{})
	for m, err := range connected(t).Read(t.Context(), schemas.StreamRewards,
		[]string{schemas.RewardFilter("r1", "*", "*")}, bus.ReadOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		p.countReward(m)
	}
	p.end()
	if !strings.Contains(out.String(), "  0 rewards  ") {
		t.Errorf("progress: %s", &out)
	}
}
