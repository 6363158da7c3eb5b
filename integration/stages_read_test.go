package integration_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/client"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/pkg/view"
	"github.com/meander-rl/meander/schemas"
	commands "github.com/meander-rl/meander/services/command"
)

// Readers give all stages of a sample, in order, or say that they do not.
func TestStages_Read(t *testing.T) {
	t.Parallel()
	c := assemble(t)
	c.twoLanes(t)
	critic(t, c)
	p := judged("g", 4)
	c.publish(t, "r", p)
	a := c.advantages(t, "r", 1)["g"]
	for _, stage := range []schemas.Stage{schemas.StageMain, "sky", "paint-4"} { // of three rounds
		want := fmt.Sprintf("stage %q; must be one of think, paint, judge, in round 2 think-2", stage)
		_, err := c.client.Stage(t.Context(), "r", "g", 0, stage)
		if !errors.Is(err, client.ErrNotFound) || !strings.Contains(err.Error(), want) {
			t.Errorf("stage %s: %v", stage, err)
		}
	}
	if _, err := c.client.Stage(t.Context(), "r", "g", 9, "paint"); !errors.Is(err, client.ErrNotFound) ||
		strings.Contains(err.Error(), "must be") {
		t.Errorf("a sample that is not there: %v", err)
	}
	reader := view.NewReader(t.Context(), c.Bus, view.Options{Once: true})
	defer reader.Close()
	g, err := reader.Group(t.Context(), "r", "g", 0, 10)
	if err != nil || len(g.Samples) != 4 {
		t.Fatalf("group: %+v, %v", g, err)
	}
	all := 0
	for _, m := range a.Members {
		made := g.StagesOf(m.SampleIndex)
		all += len(made)
		if len(made) != len(m.Stages) {
			t.Fatalf("sample %d: %d stages, want %d", m.SampleIndex, len(made), len(m.Stages))
		}
		for i, s := range m.Stages {
			one, err := c.client.Stage(t.Context(), "r", "g", s.SampleIndex, s.Stage)
			if err != nil || one.ContentDigest != made[i].Trajectory().ContentDigest || made[i].Stage != s.Stage {
				t.Errorf("stage %s of sample %d: %v", s.Stage, m.SampleIndex, err)
			}
		}
		if last := g.Trajectory(m.SampleIndex); !strings.HasPrefix(string(last.Stage), "paint") {
			t.Errorf("stage %s stands for sample %d", last.Stage, m.SampleIndex)
		}
	}
	read, err := results.Read(t.Context(), c.Bus, "r")
	if err != nil || read.Summary.Trajectories != all || read.Summary.Samples != 4 {
		t.Errorf("run: %+v, %v", read, err)
	}
	c.says(t, "show --run r g", "stage think: text of lane sums", "stage paint-2: image of lane synthetic",
		"stage judge-2: interaction critic", "and ends the sample", "log-probs by step")
	c.says(t, "show --run r g 0", "stage think-2: text of lane sums, version 0", "stands for the sample", "assistant",
		"said by", "noise level")
	c.says(t, "show --run r g 1 --json", `"place":"1.judge-3"`, `"place":"1.paint-3"`, `"stages":[`,
		`"schedule_digest":"blake3:`)
	c.says(t, fmt.Sprintf("watch --run r --kinds trajectory,advantage --count %d", all+1), "g #0.think completed, ",
		"g #1.judge-3 completed, said by critic in ", "g #3.paint-2 completed, ", "  think [", "  paint [")
}

// says runs a command, and fails if its output lacks a text.
func (c *crew) says(t *testing.T, command string, want ...string) string {
	t.Helper()
	var out, errs bytes.Buffer
	args := append(strings.Fields(command), "--nats", c.Server.ClientURL())
	if code := commands.Execute(t.Context(), args, nil, &out, &errs); code != 0 {
		t.Fatalf("%s: %s", command, errs.String())
	}
	for _, text := range want {
		if !strings.Contains(out.String(), text) {
			t.Errorf("%s lacks %q:\n%s", command, text, out.String())
		}
	}
	return out.String()
}
