package sampling_test

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/pkg/sampling"
	"github.com/meander-rl/meander/schemas"
)

// The contract, the mathematics and the cards of models know the same grids and rules for mu: what a policy may say, a
// schedule computes.
func TestSchedule_TakesWhatPoliciesSay(t *testing.T) {
	const (
		unipc = `{"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": true,
			"prediction_type": "flow_prediction"}`
		dynamic = `{"use_dynamic_shifting": true}`
	)
	seen := map[string]string{}
	for _, grid := range append([]string{""}, schemas.Grids...) {
		for _, mu := range append([]string{""}, schemas.MuRules...) {
			p := &schemas.Policy{Tenant: schemas.TenantMain, SchedulerConfig: []byte(dynamic), Grid: grid, Mu: mu}
			if grid == schemas.GridUniFlow {
				p.SchedulerConfig = []byte(unipc)
			}
			if mu == schemas.MuNone && grid != schemas.GridUniFlow {
				p.SchedulerConfig = []byte(`{"shift": 3}`)
			}
			s, err := sampling.Schedule(p)
			if err != nil {
				t.Errorf("grid %q, mu %q: %v", grid, mu, err)
				continue
			}
			sigmas, err := s.Sigmas(10, 4096)
			if err != nil {
				t.Errorf("grid %q, mu %q: %v", grid, mu, err)
			}
			seen[fmt.Sprint(sigmas)] += fmt.Sprintf("%s/%s ", grid, mu)
		}
	}
	// linspace, linspace_torch and scheduler have four rules each, and nothing shifts uni_flow here
	if len(seen) != 13 {
		t.Errorf("%d different schedules; want 13: %v", len(seen), seen)
	}
	if _, err := sampling.Schedule(&schemas.Policy{Tenant: schemas.TenantMain, SchedulerConfig: []byte(dynamic), Mu: "none"}); err == nil {
		t.Error("dynamic shifting without a rule for mu is accepted")
	}
}

// The contract, the mathematics and the Python client know the same transitions.
func TestTransitions_AreTheSameEverywhere(t *testing.T) {
	var names []string
	for _, transition := range flow.AllTransitions {
		names = append(names, string(transition))
	}
	if !slices.Equal(names, schemas.SDETypes) {
		t.Errorf("pkg/flow has %v, schemas %v", names, schemas.SDETypes)
	}
	const file = "../client/python/meander/maths/transition.py"
	source, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	list := regexp.MustCompile(`(?m)^TRANSITIONS = \(([^)]*)\)`).FindSubmatch(source)
	if list == nil {
		t.Fatalf("%s: no TRANSITIONS", file)
	}
	python := strings.Split(strings.ReplaceAll(string(list[1]), `"`, ""), ", ")
	slices.Sort(python)
	slices.Sort(names)
	if !slices.Equal(python, names) {
		t.Errorf("Python has %v, pkg/flow %v", python, names)
	}
}
