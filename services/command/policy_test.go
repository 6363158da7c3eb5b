package command

import "testing"

// A version or a lane that is not there is answered with those that are.
func TestPolicy_NotThere(t *testing.T) {
	inStore(t)
	expect(t, exitUsage, `version 99 of lane "synthetic": not found; must be one of 0`, "policy", "rollback", "99")
	expect(t, exitUsage, "VERSION: 99; must be one of lane synthetic: 0", "policy", "show", "99")
	for _, args := range [][]string{{"policy", "ls"}, {"policy", "show"}, {"policy", "rollback", "0"}} {
		expect(t, exitUsage, `--lane: "signs"; must be one of synthetic`, append(args, "--lane", "signs")...)
	}
}
