package integration_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/pkg/view"
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
	if _, err := c.client.Trajectory(t.Context(), "r", "g", 0); err == nil ||
		!strings.Contains(err.Error(), "has several stages; read each with Stage") {
		t.Errorf("trajectory: %v", err)
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
	var out, errs bytes.Buffer
	if code := commands.Execute(t.Context(), []string{"show", "--nats", c.Server.ClientURL(), "--run", "r", "g"}, nil,
		&out, &errs); code != 0 {
		t.Fatalf("show: %s", errs.String())
	}
	for _, want := range []string{"stage think: text of lane sums", "stage paint-2: image of lane synthetic",
		"stage judge-2: interaction critic", "and ends the sample", "log-probs by step"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("show lacks %q:\n%s", want, out.String())
		}
	}
}
