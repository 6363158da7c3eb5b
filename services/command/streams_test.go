package command

import (
	"fmt"
	"testing"
)

func TestStreams(t *testing.T) {
	inStore(t)
	lines := linesOf(t, expect(t, exitOK, "", "streams", "--json"))
	messages := map[any]any{}
	steps := 0.0
	for _, s := range lines {
		messages[s["name"]] = s["messages"]
		if s["name"] == "MDR_STEPS" {
			steps = s["bytes"].(float64)
		}
	}
	if messages["MDR_STEPS"] != 6.0 || messages["MDR_TRAJECTORIES"] != 2.0 || messages["MDR_ADVANTAGES"] != 1.0 {
		t.Errorf("messages %v", messages)
	}
	// One group is stored, of two samples.
	expect(t, exitOK, "space for about 100 more groups, 200 samples, of the mean size of the 1 stored groups",
		"streams", "limit", "--max-steps-bytes", fmt.Sprintf("%dB", int64(101*steps)))
	expect(t, exitOK, "", "streams", "limit", "--max-steps-bytes", "123MiB")
	expect(t, exitOK, "123.0 MiB", "streams")
	expect(t, exitOK, "run r1: ", "runs", "rm", "r1")
	expect(t, exitFailed, `run "r1": nothing is stored of it`, "runs", "rm", "r1")
	for _, s := range linesOf(t, expect(t, exitOK, "", "streams", "--json")) {
		if s["name"] == "MDR_STEPS" && s["messages"] != 0.0 {
			t.Errorf("after the purge: %v", s)
		}
	}
	expect(t, exitOK, "store a group first: its size then says how many more fit", "streams", "limit", "--max-steps-bytes", "123MiB")
}
