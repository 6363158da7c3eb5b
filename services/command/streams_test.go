package command

import "testing"

func TestStreams(t *testing.T) {
	inStore(t)
	lines := linesOf(t, expect(t, exitOK, "", "streams", "--json"))
	messages := map[any]any{}
	for _, s := range lines {
		messages[s["name"]] = s["messages"]
	}
	if messages["MDR_STEPS"] != 6.0 || messages["MDR_TRAJECTORIES"] != 2.0 || messages["MDR_ADVANTAGES"] != 1.0 {
		t.Errorf("messages %v", messages)
	}
	expect(t, exitOK, "", "streams", "limit", "--max-steps-bytes", "123MiB")
	expect(t, exitOK, "123.0 MiB", "streams")
	expect(t, exitOK, "run r1: ", "streams", "purge", "r1")
	for _, s := range linesOf(t, expect(t, exitOK, "", "streams", "--json")) {
		if s["name"] == "MDR_STEPS" && s["messages"] != 0.0 {
			t.Errorf("after the purge: %v", s)
		}
	}
}
