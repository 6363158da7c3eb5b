package sampling_test

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/flow"
	"github.com/meander-rl/meander/schemas"
)

// The contract, the mathematics and the Python client know the same transitions.
func TestTransitions_AreTheSameEverywhere(t *testing.T) {
	var names []string
	for _, transition := range flow.AllTransitions {
		names = append(names, string(transition))
	}
	if !slices.Equal(names, schemas.SDETypes) {
		t.Errorf("pkg/flow has %v, schemas %v", names, schemas.SDETypes)
	}
	const file = "../client/python/meander/transition.py"
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
